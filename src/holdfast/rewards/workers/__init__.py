"""Serving rewards in worker processes, or in this one."""
