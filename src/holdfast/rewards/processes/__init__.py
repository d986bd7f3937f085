"""Reward processes: message framing, scratch folders, confinement by the kernel, and the pool that a rank calls."""
