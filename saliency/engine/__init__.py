"""Many passes of one image: run in chunks, at the best size and precision, limited, counted and summed up."""
