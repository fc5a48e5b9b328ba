"""The terminal: what is printed, progress."""
