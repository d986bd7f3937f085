"""Holdfast's checkpoints inside other trainers: one file and one extra each, and two checks for any script."""
