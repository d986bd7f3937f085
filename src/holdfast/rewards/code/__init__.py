"""Completions that are programs, run against tests where they can do no harm."""
