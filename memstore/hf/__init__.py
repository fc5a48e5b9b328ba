"""Any Hugging Face decoder as a model adapter: the only room that imports transformers."""
