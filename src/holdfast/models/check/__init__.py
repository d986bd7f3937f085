"""The check before step 1: compare our forward pass with transformers' own on a model built from the files."""
