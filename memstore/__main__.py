"""`python -m memstore` is the command line."""

from memstore.cli.main import main

main()
