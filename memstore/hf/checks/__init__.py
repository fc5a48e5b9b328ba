"""What a model's directory holds, tried before it is loaded: settings, sizes, texts, template."""
