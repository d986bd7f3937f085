"""What stands on the layers: the output layer of a policy, the score of a reward model, a student."""
