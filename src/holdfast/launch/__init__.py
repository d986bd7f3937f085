"""Start the ranks of a run on this machine, pass signals on to them, and explain the first death."""
