"""The demonstrations: a real book with a real model, and planted facts with a landmark model."""
