"""Writing a document: admission, chunks, encoding, commits."""
