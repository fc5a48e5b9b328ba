"""What chooses the passages of a question."""
