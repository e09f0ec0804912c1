"""The commands of `saliency`, one module each."""
