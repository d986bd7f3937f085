"""Optimizers on shards: built from trained parameters only, with schedules and a norm that all ranks agree on."""
