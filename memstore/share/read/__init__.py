"""Reading a publication."""
