"""Programs: a model and its explanation as one graph, which runs without this package."""
