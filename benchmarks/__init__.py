"""What memstore finds, how fast and at what cost: one script a question, listed in README.md."""
