"""The CUDA branches of every verb's step, executed without a GPU: devices, host syncs, collectives."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fake_devices.cases import NOT_BY_PLACE, PLACES, RUNS, is_made
from tests.fake_devices.conftest import Lane, child
from tests.fake_devices.expected import difference, expected
from tests.fake_devices.parts import Matrix, Shape, block, ends

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__), pytest.mark.timeout(5400)]

UPDATE = "sums and gradient norm of an update"
DRAWN = "drawn tokens"
SAMPLED = "log-probabilities beside the sampler's"
CHECKS = "transformers checks its inputs in get_placeholder_mask"
OF_ADVANTAGES = ["values and rewards of tokens, for advantages"] * 2 + ["sequences of tokens, for advantages"]
ROLLOUT = [DRAWN] * 6
"""Tokens and their log-probabilities: the first ones, an early one, the last one."""
WAITS: dict[str, list[str]] = {
    "sft images": [CHECKS, CHECKS, UPDATE],
    "kto": ["divergence of single answers", UPDATE],
    "grpo": [*ROLLOUT, UPDATE, SAMPLED],
    "grpo shared rows": [*ROLLOUT, UPDATE, SAMPLED],
    "grpo reference": [*ROLLOUT, UPDATE, SAMPLED],
    "grpo experts": [*ROLLOUT, UPDATE, SAMPLED],
    "grpo offloaded": [*ROLLOUT, UPDATE, SAMPLED],
    "grpo truncated sampling": [*ROLLOUT, UPDATE, SAMPLED],
    "grpo by covariance": [
        *ROLLOUT,
        *["sequences of tokens, for their masks"] * 2,
        *["proximal_logprobs of tokens, for their masks"] * 2,
        *["advantages of tokens, for their masks"] * 2,
        UPDATE,
        SAMPLED,
    ],
    "ppo": [*ROLLOUT, *OF_ADVANTAGES * 2, UPDATE, UPDATE, SAMPLED],
    "distill on own texts": [DRAWN] * 6 + [UPDATE],
}  # fmt: skip
"""For what the host waits in a step of at most two micro-batches; of a run that is not named, once for its sums."""

CASES = [(name, place) for name in RUNS for place in PLACES if is_made(name, place)]


def of(lane: Lane, name: str, place: tuple[int, int]) -> dict[str, Any]:
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
    if said["micro_batches"] == 1 or place[0] == 64:
        # One micro-batch, or two of one kind: the values of each are named as often.
        assert sorted(set(waits)) == sorted(set(expected))
    else:
        assert waits == expected


@pytest.mark.cases("all")
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("name", sorted(RUNS.keys() - NOT_BY_PLACE))
def test_first_and_last_rank_send_as_many_messages_of_every_kind(lane: Lane, name: str, ranks: int) -> None:
    first, last = (of(lane, name, (ranks, rank))["messages"] for rank in (0, ranks - 1))

    assert {key: count for key, (count, _) in first.items()} == {key: count for key, (count, _) in last.items()}
    assert {key: sent for key, (_, sent) in first.items()} == {key: sent for key, (_, sent) in last.items()}


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", RUNS)
def test_a_step_takes_what_is_written_down(lane: Lane, name: str) -> None:
    assert difference(expected(name), of(lane, name, (8, 0))) == ""


def padded(matrices: list[Matrix], ranks: int) -> int:
    return sum(-(-rows // ranks) * ranks * columns for rows, columns in matrices)


def test_a_rank_alone_gathers_and_reduces_nothing(lane: Lane) -> None:
    messages = of(lane, "sft", (1, 0))["messages"]

    assert all(sent == 0 for _, sent in messages.values())


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("name", ["sft", "sft recomputed", "sft bfloat16", "sft adamw_8bit"])
def test_messages_of_an_update_are_those_that_its_units_ask_for(lane: Lane, name: str, ranks: int) -> None:
    said = of(lane, name, (ranks, 0))
    times = said["micro_batches"]
    shape = Shape(hidden=64, ffn=128, layers=2, heads=4, key_heads=2, size=16, vocabulary=512)
    blocks = [padded(block(shape), ranks)] * shape.layers
    whole = [*blocks, *(padded([matrix], ranks) for matrix in ends(shape))]
    share = (ranks - 1) / ranks
    reduced = 1 if name == "sft bfloat16" else times  # gradients of bfloat16 weights wait for the last micro-batch

    messages = said["messages"]

    # Weights are gathered in bfloat16, gradients reduced in float32; a block is gathered once more for its backward
    # pass. Rows are padded to a multiple of the ranks.
    expected = {
        "forward all_gather": (times * len(whole), times * 2 * sum(whole) * share),
        "backward all_gather": (times * len(blocks), times * 2 * sum(blocks) * share),
        "backward reduce_scatter": (reduced * len(whole), reduced * 4 * sum(whole) * share),
    }
    for key, (count, sent) in expected.items():
        assert messages[key][0] == count, (key, messages)
        assert messages[key][1] == pytest.approx(sent, rel=0.02), key
    assert messages["optimizer all_reduce"][0] == 1
    assert set(messages) == {*expected, "optimizer all_reduce"}


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize(
    ("name", "context", "key_heads", "passes"),
    [("sft shared rows", 2, 2, (1, 1)), ("sft shared rows, recomputed", 4, 4, (1, 2))],
)
def test_ranks_that_share_rows_exchange_queries_keys_values_and_results_once_a_block_and_pass(
    lane: Lane, name: str, ranks: int, context: int, key_heads: int, passes: tuple[int, int]
) -> None:
    """Two all-to-alls of q, k, v, o a block and pass: q, k, v to the heads and o back; two key heads repeat for 4."""
    said = of(lane, name, (ranks, 0))
    heads, size, blocks, tokens = 4, 16, 2, 128

    # Of each tensor in bfloat16, a rank has the rows of its span, and keeps one part of `context`.
    row = (heads + 2 * key_heads + heads) * size * 2 * tokens // context * (context - 1) // context
    micro_batches = said["micro_batches"]
    rows_of_group = 64 // (ranks // context)
    for phase, times in zip(("forward", "backward"), passes, strict=True):
        count, sent = said["messages"][f"{phase} all_to_all"]
        assert count == 4 * blocks * times * micro_batches
        assert sent == pytest.approx(row * blocks * times * rows_of_group, rel=0.01), phase


def test_copies_of_a_model_add_their_gradients_up(lane: Lane) -> None:
    said = of(lane, "sft copies", (8, 0))

    assert said["messages"]["backward all_reduce"][0] == said["micro_batches"] * len(said["units"])


@pytest.mark.parametrize("place", [(8, 0), (64, 63)])
def test_a_reference_in_host_memory_leaves_the_device(lane: Lane, place: tuple[int, int]) -> None:
    here, offloaded = (of(lane, name, place)["peaks"] for name in ("dpo", "dpo offloaded reference"))

    assert here["forward cuda"][1].get("reference", 0) > 0
    assert offloaded["forward cuda"][1].get("reference", 0) <= 0.1 * here["forward cuda"][1]["reference"]
    assert offloaded["reference cpu"][1]["reference"] > 0


def test_what_rests_in_host_memory_is_not_on_the_device_while_completions_are_sampled(lane: Lane) -> None:
    stays, rests = (of(lane, name, (8, 0))["peaks"]["rollout cuda"][1] for name in ("grpo", "grpo offloaded"))

    assert stays["optimizer"] > 0
    assert rests.get("optimizer", 0) == 0
    assert rests["parameters"] < stays["parameters"]


@pytest.mark.parametrize(
    ("name", "recorders"),
    [("grpo", 1), ("grpo experts", 1), ("distill on own texts", 1), ("sft", 0)],
)
def test_decoding_on_devices_records_its_steps_by_default(lane: Lane, name: str, recorders: int) -> None:
    assert of(lane, name, (8, 0))["recorders"] == recorders


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sft LoRA, 4 bits", "model.lora.quantize computes with matrices"),
    ],
)
def test_what_does_not_compile_is_executed_uncompiled_by_name(lane: Lane, name: str, reason: str) -> None:
    said = of(lane, name, (8, 0))

    assert said["compiled_blocks"] == 0
    assert [note for note in said["notes"] if note.startswith(f"blocks: planned uncompiled, since {reason}")]


def test_every_other_run_is_executed_with_compiled_blocks(lane: Lane) -> None:
    off = {"sft uncompiled", "sft LoRA, 4 bits"}

    assert {name for name in RUNS if of(lane, name, (8, 0))["compiled_blocks"] == 0} == off


def test_compiled_blocks_keep_less_and_send_as_much_as_uncompiled_ones(lane: Lane) -> None:
    compiled, eager = (of(lane, name, (8, 0)) for name in ("sft", "sft uncompiled"))

    kept, kept_eager = (said["peaks"]["forward cuda"][1]["activations"] for said in (compiled, eager))
    assert kept < 0.8 * kept_eager
    assert compiled["messages"] == eager["messages"]


def test_blocks_that_a_compiler_refuses_are_executed_uncompiled_by_name(lane: Lane) -> None:
    done = child("tests.fake_devices.refused", "8")

    (line,) = [line for line in done.stdout.splitlines() if line.startswith("refused ")]
    notes, compiled, kept = json.loads(line.removeprefix("refused "))
    assert compiled == 0
    assert kept == of(lane, "sft uncompiled", (8, 0))["peaks"]["forward cuda"][1]["activations"]
    (note,) = notes
    assert note.startswith("blocks: planned uncompiled, since they fail compiled (")
    assert "no C++ compiler was found" in note
