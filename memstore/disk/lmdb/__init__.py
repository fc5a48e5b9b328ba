"""LMDB: its environment, transactions and locks in this process, and its pages read without it."""
