"""Find the layers of a model, and read their outputs as maps."""
