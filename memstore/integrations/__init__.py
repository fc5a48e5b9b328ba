"""What other people's programs call a memory through: a file a program, imported only by it."""
