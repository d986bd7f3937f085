"""`residency`: parameters and optimizer rest in host memory while the engine samples, and no number changes for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.inspect.compare import differences
from holdfast.checkpoint.keep import find
from holdfast.metrics.sink import read_metrics
from tests.distributed.grpo_cases import leave_and_make_again, prompts_of, settings, train
from tests.distributed.residency_cases import run_and_watch
from tests.tiny import tiny_directory

ROWS = prompts_of(20)
HOST = {"parameters": "host", "optimizer": "host"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


def run_tree(llama: Path, place: Path, *, steps: int = 5, **sections: Any) -> dict[str, Any]:
    tree = settings(
        str(llama),
        steps=steps,
        run={"dir": str(place), "name": "r"},
        model={"dtype": "float32"},
        optim={"kind": "adamw", "lr": 0.02, "ema": {"decay": 0.5}},
        metrics={"progress": "off"},
        checkpoint={"rehearsal": True, "export_at_end": False, "keep": {"last": 9}},
    )
    return tree | {name: tree.get(name, {}) | section for name, section in sections.items()}


def of_runs(one: Path, two: Path) -> list[str]:
    return list(differences(find.one(str(one / "r")), find.one(str(two / "r"))))


def losses_of(place: Path) -> list[tuple[float, float, float]]:
    lines = read_metrics(place / "r" / "metrics.jsonl")
    return [(line["loss"], line["grad_norm"], line["reward"]) for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def stays(pools: Any, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stays")
    for told in pools(2).run(run_and_watch, run_tree(llama, place), ROWS):
        assert told["seen"] == told["between"]
        assert all("timing/to_host" not in line for line in read_metrics(place / "r" / "metrics.jsonl"))
    return place


@pytest.mark.slow
def test_what_rests_holds_no_memory_while_the_engine_samples_and_every_number_stays(
    pools: Any, llama: Path, stays: Path, tmp_path: Path
) -> None:
    told = pools(2).run(run_and_watch, run_tree(llama, tmp_path, residency=HOST), ROWS)

    for each in told:
        assert each["seen"] == [(0, 0)] * 5
        parameters, states = each["between"][-1]
        assert parameters > 0
        assert states > 2 * parameters
    assert of_runs(tmp_path, stays) == []
    assert losses_of(tmp_path) == losses_of(stays)
    lines = [line for line in read_metrics(tmp_path / "r" / "metrics.jsonl") if "loss" in line]
    assert all(line["timing/to_host"] > 0 for line in lines)
    assert all(line["timing/from_host"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("section", "rest"),
    [({"optimizer": "host"}, (False, True)), ({"parameters": "host"}, (True, False))],
)
@pytest.mark.slow
def test_one_of_both_can_rest_alone(
    pools: Any, llama: Path, tmp_path: Path, section: dict[str, str], rest: tuple[bool, bool]
) -> None:
    told = pools(2).run(run_and_watch, run_tree(llama, tmp_path, steps=2, residency=section), ROWS)[0]

    assert [tuple(size == 0 for size in sizes) for sizes in told["seen"]] == [rest] * 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("action", ["raise", "sigterm"])
@pytest.mark.slow
def test_a_save_in_the_middle_of_a_rollout_goes_on_bit_for_bit(
    pools: Any, llama: Path, stays: Path, tmp_path: Path, action: str
) -> None:
    """All ranks raise while they sample, and save the last whole step; or one rank is asked to end."""
    tree = run_tree(llama, tmp_path, residency=HOST)

    told = pools(2).run(run_and_watch, tree, ROWS, action)

    assert find.one(str(tmp_path / "r")).manifest.step == 2
    for each in told:
        assert each["seen"] == [(0, 0)] * 3
        assert each["error"] == ("in the middle of a rollout" if action == "raise" else "")
    pools(2).run(run_and_watch, tree, ROWS)
    assert of_runs(tmp_path, stays) == []
    assert losses_of(tmp_path) == losses_of(stays)


def test_a_step_that_is_left_while_its_model_rests_is_made_again_exactly(pools: Any, llama: Path) -> None:
    plain = settings(str(llama), optim={"kind": "adamw", "lr": 0.01})

    straight = pools(2).run(train, plain, ROWS, 2)[0]["sampled"]
    for found in pools(2).run(leave_and_make_again, plain | {"residency": HOST}, ROWS):
        assert (found["left"], found["step"], found["scored"]) == (True, 1, 1)
        assert found["sampled"] == [[(item[0], item[2]) for item in step] for step in straight]


@pytest.mark.slow
def test_quantised_moments_a_critic_and_a_reference_that_follows_go_together(
    pools: Any, llama: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "optim": {"kind": "adamw_8bit", "lr": 0.02},
        "advantage": {"kind": "gae"},
        "critic": {"optim": {"kind": "adamw", "lr": 0.01}, "warmup_steps": 1},
        "kl": {"coefficient": 0.1},
        "reference": {"sync": {"every_steps": 2}},
    }
    wide = tiny_directory(tmp_path / "wide", "llama", hidden_size=64, intermediate_size=128)
    for name, residency in (("moves", HOST), ("stays", {})):
        tree = run_tree(wide, tmp_path / name, steps=3, **sections, residency=residency)
        tree["optim"].pop("ema")
        told = pools(2).run(run_and_watch, tree, ROWS)

        if name == "moves":
            assert [each["seen"] for each in told] == [[(0, 0)] * 3] * 2
    keys = find.one(str(tmp_path / "moves" / "r")).manifest.tensors
    assert any("codes" in key for key in keys), "the case must have quantised state"
    assert of_runs(tmp_path / "moves", tmp_path / "stays") == []


def test_a_rank_alone_without_copies_keeps_its_parameters_and_says_so(pools: Any, llama: Path, tmp_path: Path) -> None:
    told = {}
    for name, section in {"moves": {"residency": HOST}, "stays": {}}.items():
        tree = run_tree(llama, tmp_path / name, steps=2, **section)
        told[name] = pools(1).run(run_and_watch, tree, ROWS)[0]

    assert all(parameters > 0 and states == 0 for parameters, states in told["moves"]["seen"])
    assert any("residency.parameters" in line for line in told["moves"]["said"])
    assert not any("residency" in line for line in told["stays"]["said"])
    assert of_runs(tmp_path / "moves", tmp_path / "stays") == []


@pytest.mark.slow
def test_a_rank_alone_that_computes_from_copies_rests_too_and_has_the_numbers_of_fsdp2(
    pools: Any, llama: Path, tmp_path: Path
) -> None:
    sections = {"moves": {"residency": HOST}, "stays": {}, "fsdp2": {"parallel": {"cpu_offload": True}}}
    told = {}
    for name, section in sections.items():
        parallel = {"compute_dtype": "bfloat16"} | section.get("parallel", {})
        tree = run_tree(llama, tmp_path / name, steps=3, **(section | {"parallel": parallel}))
        told[name] = pools(1).run(run_and_watch, tree, ROWS)[0]

    assert told["moves"]["seen"] == [(0, 0)] * 3
    assert all(parameters > 0 for parameters, _ in told["stays"]["seen"])
    for name in ("moves", "fsdp2"):
        assert losses_of(tmp_path / name) == losses_of(tmp_path / "stays")
        # The run of FSDP2 has no copies to compute from.
        form = ["trainer.json: state.forms.copies differs"] if name == "fsdp2" else []
        assert of_runs(tmp_path / name, tmp_path / "stays") == form
