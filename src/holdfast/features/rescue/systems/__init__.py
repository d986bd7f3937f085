"""Other systems' keys as data, one YAML file a system, and their reader."""
