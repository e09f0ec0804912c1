"""Many passes of one image: run in chunks, at the best size, limited, counted and summed up."""
