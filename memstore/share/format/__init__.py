"""The format of a publication: manifests, pages of documents, segments, pieces."""
