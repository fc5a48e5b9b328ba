"""Retrievers of other frameworks over a memory: one file for each framework."""
