"""Options of the command line: those that several commands have, and those of single ones."""
