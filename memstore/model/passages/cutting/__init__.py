"""A text as passages."""
