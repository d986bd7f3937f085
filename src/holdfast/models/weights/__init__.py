"""Weights in files: names, dtypes and layouts of files and of the model, and reading and writing them."""
