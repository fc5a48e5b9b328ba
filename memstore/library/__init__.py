"""Ingest a library of documents on many machines into one published memory."""
