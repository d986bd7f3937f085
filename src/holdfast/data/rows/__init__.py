"""Rows from files, in an order."""
