"""Copies of offloaded tensors run beside what computes, and every race between the two is noticed."""

from __future__ import annotations

import json

import pytest

from tests.fake_devices.conftest import child, needs_guard
from tests.fake_devices.offload_order import FAULTS, KINDS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__), pytest.mark.timeout(600)]

SEEDS = range(12)
PRODUCT, TO_HOST, TO_DEVICE = "product by 0", "to the host by 2", "to the device by 2"
Said = dict[tuple[str, str, str], tuple[list[str], list[str]]]


@pytest.fixture(scope="module")
def said() -> Said:
    """The order of copies, and races, by module, form of it and kind of pass."""
    needs_guard()
    done = child("tests.fake_devices.offload_order", *map(str, SEEDS))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("order ")]
    return {(subject, form, kind): (order, races) for subject, form, kind, order, races in lines}


def test_a_block_is_copied_when_it_has_run_and_fetched_before_the_block_behind_it_goes_back(said: Said) -> None:
    order, races = said["activations", "as it is", "plain"]

    # Each block saves its input and the sine of it. The last one stays, and its backward pass fetches the third's.
    assert order == [
        *[PRODUCT, TO_HOST, TO_HOST] * 3, PRODUCT,
        *[TO_DEVICE, TO_DEVICE, PRODUCT, PRODUCT] * 3, PRODUCT, PRODUCT,
    ]  # fmt: skip
    assert not races


def test_a_recomputed_block_is_fetched_before_the_block_behind_it_is_recomputed(said: Said) -> None:
    order, races = said["activations", "as it is", "recomputed"]

    # A block saves its input alone. Nothing reads its product again, so that recomputation stops before it.
    assert order == [*[PRODUCT, TO_HOST] * 3, PRODUCT, *[TO_DEVICE, PRODUCT, PRODUCT] * 3, PRODUCT, PRODUCT]
    assert not races


def test_a_backward_pass_that_fails_frees_no_memory_that_is_being_copied_to(said: Said) -> None:
    assert not said["activations", "as it is", "failing"][1]


def test_gradients_leave_during_the_last_backward_pass_alone_and_weights_before_the_first_step(said: Said) -> None:
    order, races = said["host_steps", "as it is", "updates"]

    copied = [place for place in order if place != PRODUCT]
    update = [*[TO_HOST] * 4, *["to the device by 0"] * 4]
    assert copied == [*[TO_HOST] * 4, *update * 2]
    first = order.index(TO_HOST)
    assert order[:first].count(PRODUCT) > 2 * 4 + 4, "both forward passes, and the first backward pass"
    assert PRODUCT in order[first : first + 4], "between two copies of gradients a block computes"
    assert not races


@pytest.mark.parametrize(
    ("subject", "form"),
    [(subject, form) for subject, faults in FAULTS.items() for form in (*faults, *(f"seed {seed}" for seed in SEEDS))],
)
def test_every_planted_or_drawn_fault_is_noticed(said: Said, subject: str, form: str) -> None:
    noticed = [kind for kind in KINDS[subject] if said[subject, form, kind] != said[subject, "as it is", kind]]

    assert noticed, "neither a race nor another order of copies"
