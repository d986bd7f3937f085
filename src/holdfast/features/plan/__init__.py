"""Estimates the memory and time of a run before it starts, by executing its step on devices that compute nothing."""
