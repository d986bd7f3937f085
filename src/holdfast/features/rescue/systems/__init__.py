"""The configuration keys of other systems as data, in one YAML file per system, and their reader."""
