"""Making and measuring the selector of a passage model."""
