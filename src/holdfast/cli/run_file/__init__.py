"""Verbs that read a run's file and its rows: write a first one, show it, import it, check it."""
