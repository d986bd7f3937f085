"""Where checkpoints lie: storage, leases, hashes, names of files."""
