"""Hooks on modules and autograd nodes, and the model's state before and after a call."""
