"""Documents in files and from publications, whole."""
