"""From tokens to mini-batches, packed and exchanged between ranks."""
