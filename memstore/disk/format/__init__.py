"""Stored formats: codecs, runs, documents, places, signatures."""
