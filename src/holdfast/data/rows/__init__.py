"""Rows from files, saved data sets, the hub and live objects, and their order."""
