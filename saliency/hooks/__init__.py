"""Hooks on modules and autograd nodes, and the model as it was before and after a call."""
