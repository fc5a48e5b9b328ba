"""The terminal: what is printed, progress, signals."""
