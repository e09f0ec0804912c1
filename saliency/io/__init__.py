"""Read and preprocess images, and write files atomically."""
