"""Environments in processes."""
