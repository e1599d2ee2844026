"""`bench gpu`: everything that needs a GPU, in a few minutes."""
