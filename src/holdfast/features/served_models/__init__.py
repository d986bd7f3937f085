"""Served models: a reference or a teacher behind an OpenAI-compatible endpoint."""
