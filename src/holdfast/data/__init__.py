"""Data: rows, their contents, token sequences, batches. Imports only configuration, types and errors."""
