"""Reading a library of documents by many machines into one published memory."""
