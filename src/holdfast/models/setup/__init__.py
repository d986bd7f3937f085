"""Build a model from its configuration section, and freeze parameters."""
