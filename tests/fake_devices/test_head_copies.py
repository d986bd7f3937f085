"""A head in bfloat16 is multiplied as it is on a GPU, where its product is in float32."""

from __future__ import annotations

import json

import pytest

from tests.fake_devices.conftest import child, needs_guard


@pytest.mark.slow
def test_a_float32_product_copies_the_matrix_for_gradients_alone() -> None:
    needs_guard()

    done = child("tests.fake_devices.head_copies")

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    with_gradients = [name for name, (copies, _) in found.items() if copies]
    assert with_gradients == [
        "backward pass, torch", "loss with gradients, torch", "backward pass, kernels", "loss with gradients, kernels",
        "student and teacher",
    ]  # fmt: skip
    assert max(copies for copies, _ in found.values()) == 1
    assert not any(narrow for _, narrow in found.values()), "a product was rounded to bfloat16"
