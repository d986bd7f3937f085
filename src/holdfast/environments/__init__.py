"""Environments that a policy acts in over several turns, in processes that can be killed."""
