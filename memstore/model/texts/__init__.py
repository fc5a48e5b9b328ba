"""Text: as it is read, as passages are cut from it, as it is shown."""
