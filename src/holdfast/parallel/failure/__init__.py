"""Failure reports, heartbeats and time-outs, by which ranks learn of each other's failures."""
