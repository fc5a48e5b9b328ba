"""LMDB: environment, transactions and locks of this process, and checks of the data file."""
