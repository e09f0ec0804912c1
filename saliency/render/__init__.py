"""Draw explanations: overlays, contact sheets, figures, and the image in a notebook."""
