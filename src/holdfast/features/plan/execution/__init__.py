"""Builds the step of a run and executes it on devices that compute nothing."""
