"""Pairs of answers: DPO and its kin."""
