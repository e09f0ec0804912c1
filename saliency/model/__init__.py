"""The user's network in a call: its state, arguments, layers and positions, and answers of language models."""
