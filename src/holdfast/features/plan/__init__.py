"""What a run will take before it starts: its own step, executed on devices that compute nothing."""
