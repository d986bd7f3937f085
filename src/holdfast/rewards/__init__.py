"""Rewards: built-in rules and judges, users' functions in processes that can be killed, and their combination."""
