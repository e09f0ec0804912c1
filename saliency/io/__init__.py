"""Read images of any kind, and write files that are complete or absent."""
