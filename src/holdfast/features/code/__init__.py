"""The code reward: run programs in completions against tests, in isolated processes."""
