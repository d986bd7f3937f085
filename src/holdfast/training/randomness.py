"""Seed the global random generators of a rank.

Initial weights and the order of rows have separate generators, which depend on neither rank nor step. Only dropout
draws from torch's global generator, which is seeded here differently for each rank.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_rank(seed: int, rank: int, *, deterministic: bool, step: int = 0) -> None:
    """Seed every global generator of this process.

    Args:
        seed: Of the run.
        rank: Each draws its own numbers.
        deterministic: Refuse operations that have no deterministic form.
        step: Updates done, for a run that goes on at another number of ranks: its draws are new ones.
    """
    digest = hashlib.sha256((f"{seed}:{rank}:{step}" if step else f"{seed}:{rank}").encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 - libraries that draw from the global generator exist
    # This seeds the generators of all devices, those that are initialised later included.
    torch.manual_seed(number)
    torch.use_deterministic_algorithms(deterministic)
