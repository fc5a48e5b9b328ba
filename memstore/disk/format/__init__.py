"""The stored forms: keys, records and codecs, runs, documents, signatures."""
