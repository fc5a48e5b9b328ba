"""Training of landmark models: texts, pages, objectives, curriculum, loop."""
