"""`python -m memstore` is the command line."""

from memstore.cli import main

main()
