"""Draw explanations: overlays, contact sheets and figures."""
