"""Ranks: the device mesh, the sharding plan and its application with FSDP2, and our own collectives."""
