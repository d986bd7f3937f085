"""Counts the bytes, messages and floating-point operations of a step while it runs."""
