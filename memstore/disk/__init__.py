"""A memory as files on one disk: LMDB, the tables, the records. NumPy, no torch."""
