"""Policy optimisation: rollouts, rewards, groups, advantages, critics, what is recorded."""
