"""Where a model comes from: its directory or hub name, configuration, processor, and its modules on meta."""
