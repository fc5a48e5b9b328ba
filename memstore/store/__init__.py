"""One object for all of a memory's storage: documents, their landmark index and their tiers."""
