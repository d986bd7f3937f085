"""Ranks: the mesh they form, the plan of who holds what, and the few collectives that are not FSDP's own."""
