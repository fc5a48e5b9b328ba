"""Publish memories to an object store, and read them from there."""
