"""`parallel.offload` changes no bit: losses, gradient norms, gradients and parameters are those without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.recipes.sft import sft_step
from holdfast.training.setup.begin import Live, build_run
from tests.distributed import grpo_cases, preference_cases
from tests.distributed.cases import rows_of, settings, train
from tests.distributed.compile_cases import train_compiled
from tests.tiny import COMMON, tiny_directory

ROWS = rows_of(24)
LAYERS = 4
ADAMW = {"kind": "adamw", "lr": 0.01, "clip_norm": 1.0}
LORA = {"lora": {"rank": 2}}
BFLOAT16 = {"model": {"dtype": "float32"}, "parallel": {"compute_dtype": "bfloat16"}}
SMALL = {"data": {"tokens_per_micro_batch": 96}}
FULL = {"parallel": {"recompute": "full"}}

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 1, SMALL),
    "llama recomputed": ("llama", 1, FULL),
    "copies in bfloat16": ("llama", 1, BFLOAT16 | SMALL),
    "LoRA": ("llama", 1, {"model": LORA}),
    "experts, 2 ranks": ("qwen3_moe", 2, SMALL),
    "llama, 2 ranks": ("llama", 2, {}),
    "2 ranks, every second block recomputed": ("llama", 2, {"parallel": {"recompute": "every_k"}}),
    "2 ranks, units in units": ("llama", 2, {"parallel": {"units": [r"layers\.\d+\.mlp$", r"layers\.\d+$"]}}),
    "2 ranks, two blocks a unit": ("llama", 2, SMALL | {"parallel": {"blocks_per_unit": 2}}),
    "2 ranks, LoRA recomputed": ("llama", 2, FULL | {"model": LORA}),
    "2 ranks that share rows": ("llama", 2, {"parallel": {"context": 2}}),
    "2 ranks in bfloat16, recomputed": ("llama", 2, BFLOAT16 | {"parallel": BFLOAT16["parallel"] | FULL["parallel"]}),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def of(kind: str) -> str:
        if kind not in made:
            made[kind] = tiny_directory(tmp_path_factory.mktemp(kind), kind, num_hidden_layers=LAYERS)
        return str(made[kind])

    return of


def assert_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (found["losses"], found["norms"]) == (expected["losses"], expected["norms"])
    for one, two in zip([*found["gradients"], found["parameters"]], [*expected["gradients"], expected["parameters"]],
                        strict=True):  # fmt: skip
        assert one.keys() == two.keys()
        for name, value in two.items():
            np.testing.assert_array_equal(one[name], value, err_msg=name)


def with_offload(tree: dict[str, Any], *parts: str) -> dict[str, Any]:
    return tree | {"parallel": tree.get("parallel", {}) | {"offload": list(parts)}}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "parts",
    [("activations",), ("optimizer",), ("activations", "optimizer"), ("activations", "optimizer", "parameters")],
    ids=",".join,
)
def test_three_updates_have_the_bits_of_a_run_without_offloading(
    pools: Any, directory: Any, case: str, parts: tuple[str, ...]
) -> None:
    kind, ranks, sections = CASES[case]
    tree = settings(directory(kind), **{"optim": ADAMW} | sections)
    plain = tree
    if "parameters" in parts and ranks == 1:
        plain = with_offload(tree, "optimizer", "parameters")  # a rank alone has no FSDP2 without it

    expected = pools(ranks).run(train, plain, ROWS)
    found = pools(ranks).run(train, with_offload(tree, *parts), ROWS)

    for one, two in zip(found, expected, strict=True):
        assert_bits(one, two)
        assert two["offloaded_bytes"] == 0
        assert (one["offloaded_bytes"] > 0) == ("activations" in parts)


def test_of_recomputed_blocks_inputs_alone_are_copied(pools: Any, directory: Any) -> None:
    tree = settings(directory("llama"), **FULL)

    (found,) = pools(1).run(train, with_offload(tree, "activations"), ROWS)

    # Each block but the last: hidden states of every token in float64, once an update. No parameter is among them.
    tokens = found["metrics"][-1]["num_tokens"]
    assert found["offloaded_bytes"] == (LAYERS - 1) * tokens * COMMON["hidden_size"] * 8


@pytest.mark.slow
def test_compiled_blocks_are_offloaded_by_as_many_programs(pools: Any, directory: Any) -> None:
    tree = settings(directory("llama"), **SMALL)
    tree["parallel"] = {"compile": "blocks"}

    expected = pools(1).run(train_compiled, tree, ROWS, 3)[0]
    found = pools(1).run(train_compiled, with_offload(tree, "activations"), ROWS, 3)[0]

    assert_bits(found, expected)
    assert found["offloaded_bytes"] > 0
    assert found["graphs"] == expected["graphs"]
    assert not found["breaks"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_preferences_are_learnt_with_the_same_bits(pools: Any, directory: Any, ranks: int) -> None:
    rows = preference_cases.pairs_of(12)
    tree = preference_cases.settings(directory("llama"), preference={"loss": "dpo"})

    expected = pools(ranks).run(preference_cases.train, tree, rows)[0]
    found = pools(ranks).run(preference_cases.train, with_offload(tree, "activations", "optimizer"), rows)[0]

    for name in ("gradients", "parameters"):
        np.testing.assert_equal(found[name], expected[name])


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_policies_are_updated_with_the_same_bits(pools: Any, directory: Any, ranks: int) -> None:
    rows = grpo_cases.prompts_of(12)
    tree = grpo_cases.settings(directory("llama"), updates={"mini_batches": 2})

    expected = pools(ranks).run(grpo_cases.train, tree, rows)[0]
    found = pools(ranks).run(grpo_cases.train, with_offload(tree, "activations", "optimizer"), rows)[0]

    assert (found["offloads"], expected["offloads"]) == (True, False)
    np.testing.assert_equal(found["parameters"], expected["parameters"])


def gradients_that_left(world: World, tree: dict[str, Any], rows: Any) -> dict[str, list[bool]]:
    """Make an update; return of each parameter, each time that its gradient was whole, whether it has left at once."""
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows))
    left: dict[str, list[bool]] = {}
    for name, parameter in sharded_parameters(training.model.module).items():
        # Hooks are called in the order in which they were registered: this one after that of the host's steps.
        note = partial(lambda name, value: left.setdefault(name, []).append(value.grad is None), name)
        parameter.register_post_accumulate_grad_hook(note)
    assert sft_step(training) is not None
    return left


@pytest.mark.parametrize(("ranks", "sections"), [(1, {}), (1, BFLOAT16), (2, {})], ids=["1", "1, copies", "2"])
def test_gradients_leave_during_the_backward_pass_of_the_last_micro_batch(
    pools: Any, directory: Any, ranks: int, sections: dict[str, Any]
) -> None:
    tree = settings(directory("llama"), **{"optim": ADAMW} | sections | {"data": {"tokens_per_micro_batch": 64}})

    for left in pools(ranks).run(gradients_that_left, with_offload(tree, "optimizer"), ROWS):
        assert len(left) > LAYERS
        for name, times in left.items():
            assert len(times) > 1, "several micro-batches"
            assert times == [False] * (len(times) - 1) + [True], name
