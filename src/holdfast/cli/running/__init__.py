"""Verbs that start ranks and servers, and what runs in these processes."""
