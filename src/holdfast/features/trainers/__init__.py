"""Saves and resumes other trainers through Holdfast (one module per trainer), and offers two checks for any script."""
