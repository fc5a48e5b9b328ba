"""Calls to another machine: deadlines, and why one failed."""
