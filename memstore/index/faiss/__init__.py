"""Approximate engines over landmark keys, by FAISS."""
