"""Verbs that look at what runs left, and use their models."""
