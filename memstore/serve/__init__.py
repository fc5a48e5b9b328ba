"""What other programs ask over HTTP."""
