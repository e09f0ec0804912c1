"""Activations and gradients in numbers, streamed over any number of batches."""
