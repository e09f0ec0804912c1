"""What is put in place of a picture or of its parts: baselines, fillings and superpixels."""
