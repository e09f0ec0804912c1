"""Targets: from the output of the model to a question, with its score, for each image."""
