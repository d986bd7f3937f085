"""One section of the configuration a file."""
