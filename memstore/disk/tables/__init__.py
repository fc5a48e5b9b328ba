"""The tables of a memory: documents, texts, passages, search data, records."""
