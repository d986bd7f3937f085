"""One file per algorithm; each is its own documentation."""
