"""Storage of checkpoints on file systems and in object stores: file names, hashes, memory, leases."""
