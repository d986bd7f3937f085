"""Policy optimisation: rollouts, rewards, groups of completions, advantages, critics, metrics."""
