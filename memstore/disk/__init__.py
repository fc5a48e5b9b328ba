"""The on-disk format of a memory: LMDB, tables, records. NumPy only, no torch."""
