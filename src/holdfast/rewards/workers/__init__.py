"""Call reward functions in supervised worker processes, or in this process."""
