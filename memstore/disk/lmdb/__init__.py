"""LMDB: its environment, transactions and locks in this process, and checks of its file."""
