"""Landmark attention: what a layer step looks up, and how it attends to that."""
