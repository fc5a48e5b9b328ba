"""Where a model's files are, and directories that take their place once they are whole."""
