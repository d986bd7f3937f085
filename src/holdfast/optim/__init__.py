"""Optimizers on sharded parameters, their groups and schedules, their state by name, and weight averages."""
