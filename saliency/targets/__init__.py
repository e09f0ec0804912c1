"""What is explained: from the model's output to one score per image."""
