"""How many operations an update runs on a device, counted by hand."""

from __future__ import annotations

import json

import pytest
import torch

from tests.fake_devices.conftest import child, needs_guard
from tests.fake_devices.expected import WRITTEN_FOR

pytestmark = pytest.mark.slow

if tuple(map(int, torch.__version__.split(".")[:2])) != WRITTEN_FOR:
    pytest.skip("other versions of torch take operations apart in other ways", allow_module_level=True)

NORM = 8
"""To float32, square, mean, epsilon, root, product, to bfloat16, product with the weight."""
NORM_BACKWARD = 16
"""Two products and a sum for the weight; to float32; two products and a sum; three for the root, the mean's division,
three for the square, their sum; to bfloat16."""
ROTATION = 5
"""Product with cosines, negation of a half, concatenation, product with sines, sum."""
ROTATION_BACKWARD = 7
"""Two products, a negation, the slopes of two slices, two sums."""
FORWARD = 2 * NORM + 7 + 2 * ROTATION + 1 + 2 + 2
"""A block: norms, products, rotations of queries and keys, attention, SiLU and its product, residuals."""
BACKWARD = 2 * NORM_BACKWARD + 2 * 7 + 2 * ROTATION_BACKWARD + 3 + 2 + 2 + 7 + 5 + 1
"""A block: besides these, zeros for attention's random state, copies of the slopes of queries and keys, two products
and seven operations of SiLU, sums of what meets at a norm (2 + 1) and at residuals (2), and one of all gradients into
float32."""


def test_an_update_runs_as_many_operations_as_are_counted_by_hand() -> None:
    needs_guard()

    done = child("tests.fake_devices.operations")

    assert done.returncode == 0, done.stderr[-3000:]
    for blocks, counts in json.loads(done.stdout).items():
        # Batches and weights come (9), an embedding (1), transformers looks for documents in positions (5), cosines and
        # sines (9), a norm; which states are scored (8), the sums that they go to (3), logits and what is read of them
        # (14), a loss (7), its slopes and their products (8), metrics (13).
        assert counts["forward"] == 9 + 1 + 5 + 9 + NORM + 8 + 3 + 14 + 7 + 8 + 13 + int(blocks) * FORWARD
        # Slopes of the head are scaled (7); those of its matrix stay in float32 and are not stored again. States get
        # theirs (2), a norm and the embedding (1), which stores its gradient (1).
        assert counts["backward"] == 7 + 2 + NORM_BACKWARD + 1 + 1 + int(blocks) * BACKWARD
        # The gradient's norm of all parameters at once (8), sums of the ranks (4), the factor that clips and whether
        # all is finite (12); three operations for all parameters that decay, and three for all others.
        assert counts["optimizer"] == 8 + 4 + 12 + 2 * 3
