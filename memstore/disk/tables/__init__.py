"""The tables of a memory: documents, blocks, passages, and what they are found by."""
