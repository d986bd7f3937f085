"""The configuration tree: YAML = tree = overrides. Never imports torch, so checking a file costs no start-up time."""
