"""Other models that score a batch: references, teachers, tables of their numbers, servers."""
