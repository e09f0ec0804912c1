"""Run a part of a model again: from a layer on, or where a window of the image reaches."""
