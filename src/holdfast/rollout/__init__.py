"""Completions from the policy that is being trained."""
