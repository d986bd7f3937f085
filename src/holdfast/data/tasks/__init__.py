"""Tasks that are generated, for demos and tests."""
