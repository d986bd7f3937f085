"""Find checkpoints, choose the one to resume from, and delete those that retention does not keep."""
