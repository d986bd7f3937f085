"""Other models that score batches: reference policies, teachers, precomputed tables, models behind a server."""
