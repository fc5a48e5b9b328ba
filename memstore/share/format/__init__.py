"""What a publication consists of: manifests, pages of documents, segments, pieces."""
