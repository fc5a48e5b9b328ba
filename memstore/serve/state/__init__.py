"""What a server stores beside the memory, in one SQLite file."""
