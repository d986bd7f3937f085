"""Checkpoints of a run: contents, times, rehearsals, resumes, branches, and exports."""
