"""The CUDA branches of a step, executed without a GPU: devices, host syncs, memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_devices.cases import PLACES, RUNS, is_made
from tests.fake_devices.conftest import Lane
from tests.fake_devices.expected import difference, expected

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__), pytest.mark.timeout(5400)]

UPDATE = "sums and gradient norm of an update"
SAMPLED = "log-probabilities beside the sampler's"
CHECKS = "transformers checks its inputs in get_placeholder_mask"
OF_ADVANTAGES = ["values and rewards of tokens, for advantages"] * 2 + ["sequences of tokens, for advantages"]
ROLLOUT = ["drawn tokens"] * 6
"""Tokens and their log-probabilities: the first ones, an early one, the last one."""
WAITS: dict[str, list[str]] = {
    "sft images": [CHECKS, CHECKS, UPDATE],
    "grpo reference": [*ROLLOUT, UPDATE, SAMPLED],
    "ppo": [*ROLLOUT, *OF_ADVANTAGES * 2, UPDATE, UPDATE, SAMPLED],
    "distill on own texts": [*ROLLOUT, UPDATE],
}
"""For what the host waits in a step of at most two micro-batches; of a run that is not named, once for its sums."""

CASES = [(name, place) for name in RUNS for place in PLACES if is_made(name, place)]


def of(lane: Lane, name: str, place: tuple[int, int] = (8, 0)) -> dict[str, Any]:
    said = lane[place][name]
    assert "error" not in said, said["error"]
    return said


@pytest.mark.cases("all")
@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_step_is_executed_and_waits_for_its_listed_host_values_alone(
    lane: Lane, name: str, place: tuple[int, int]
) -> None:
    said = of(lane, name, place)
    waits = [reason for _, reason in said["host_values"]]
    expected = WAITS.get(name, [UPDATE])
    if said["micro_batches"] == 1:
        # One micro-batch, or two of one kind: the values of each are named as often.
        assert sorted(set(waits)) == sorted(set(expected))
    else:
        assert waits == expected


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", RUNS)
def test_a_step_takes_what_is_written_down(lane: Lane, name: str) -> None:
    assert difference(expected(name), of(lane, name)) == ""


def test_a_reference_in_host_memory_leaves_the_device(lane: Lane) -> None:
    offloaded = of(lane, "dpo offloaded reference")["peaks"]

    assert offloaded["reference cpu"][1]["reference"] > 0
    assert offloaded["forward cuda"][1].get("reference", 0) <= 0.1 * offloaded["reference cpu"][1]["reference"]


def test_keys_and_values_of_a_policy_that_is_whole_stay_until_the_next_rollout(lane: Lane) -> None:
    alone, sharded = (of(lane, "grpo reference", place)["peaks"] for place in PLACES)

    stays = alone["rollout cuda"][1]["key_value_cache"]
    assert [alone[f"{phase} cuda"][1].get("key_value_cache") for phase in ("forward", "optimizer")] == [stays, stays]
    assert sharded["optimizer cuda"][1].get("key_value_cache", 0) == 0


@pytest.mark.parametrize(("name", "recorders"), [("ppo", 1), ("distill on own texts", 1), ("sft", 0)])
def test_decoding_on_devices_records_its_steps_by_default(lane: Lane, name: str, recorders: int) -> None:
    assert of(lane, name)["recorders"] == recorders


def test_every_run_is_executed_with_compiled_blocks_but_matrices_of_four_bits(lane: Lane) -> None:
    notes = of(lane, "sft LoRA, 4 bits")["notes"]

    assert [name for name in RUNS if of(lane, name)["compiled_blocks"] == 0] == ["sft LoRA, 4 bits"]
    reason = "blocks: planned uncompiled, since model.lora.quantize computes with matrices"
    assert [note for note in notes if note.startswith(reason)]
