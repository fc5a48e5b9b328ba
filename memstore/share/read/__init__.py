"""A published memory as it is read."""
