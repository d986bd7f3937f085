"""Other models that score batches: reference policies, teachers, tables of a reference's numbers."""
