"""Mini-batches: reading candidates, packing, exchange between ranks, and the resumable stream."""
