"""From rows to token sequences to batches. Imports only configuration, types and errors."""
