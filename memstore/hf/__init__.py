"""Any Hugging Face decoder as a reader: the only room that imports transformers."""
