"""Distillation of a teacher into a student: building the run, and its steps."""
