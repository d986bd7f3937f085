"""Episodes of several turns, token for token."""
