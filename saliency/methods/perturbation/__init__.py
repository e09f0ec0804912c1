"""Methods that hide parts of the image, and the segments and fills that they share."""
