"""Memories published to an object store, and read from there."""
