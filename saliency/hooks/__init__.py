"""Hooks and the autograd graph of one call. Private names of PyTorch stand here."""
