"""Turns another system's checkpoint into a checkpoint of a Holdfast run."""
