"""Averages of the weights: a plain loop over saved weights, at any number of ranks, evaluated and exported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from holdfast.checkpoint.errors import NoCheckpoint
from holdfast.checkpoint.keep import find
from holdfast.cli.main import app
from holdfast.errors import ConfigError
from holdfast.metrics.sink import read_metrics
from holdfast.optim.averages import Averages
from tests.crash.runs import log_of, state_differences, values_of
from tests.training.cases import evaluate, run

DECAY = 0.75


def values(directory: Path, *, steps: int, checkpoint: dict[str, Any] | None = None, **ema: Any) -> dict[str, Any]:
    """Return a run that keeps averages and saves at every step."""
    optim = {"lr": 2e-3, "schedule": "constant", "ema": {"decay": DECAY} | ema}
    return values_of(directory, steps=steps, optim=optim, checkpoint={"every_steps": 1} | (checkpoint or {}))


def saved(directory: Path, step: int, kind: str) -> dict[str, Tensor]:
    """Return the tensors of one kind in a step's checkpoint."""
    stored = find.one(str(directory / "r" / "checkpoints" / f"step-{step:08d}"))
    return {key.removeprefix(kind): stored.read(key) for key in stored.manifest.tensors if key.startswith(kind)}


def followed(before: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: DECAY * before[name].double() + (1 - DECAY) * weights[name].double() for name in before}


@pytest.fixture(scope="module")
def straight(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of four steps on two ranks whose averages begin after the first."""
    place = tmp_path_factory.mktemp("straight")
    pools(2).run(run, values(place, steps=4, start_step=1, checkpoint={"export_at_end": True}))
    return place


@pytest.mark.slow
def test_averages_are_a_plain_loop_over_the_weights_of_every_step(straight: Path) -> None:
    weights = {step: saved(straight, step, "model.") for step in range(1, 5)}

    expected = {name: value for name, value in weights[1].items() if name in saved(straight, 1, "ema.")}
    assert len(expected) == len(weights[1]) > 10
    for step in range(1, 5):
        if step > 1:
            expected = followed(expected, weights[step])
        for name, average in saved(straight, step, "ema.").items():
            torch.testing.assert_close(average.double(), expected[name].double(), rtol=1e-5, atol=1e-8)
    assert not torch.equal(saved(straight, 4, "ema.")["model.norm.weight"], weights[4]["model.norm.weight"])


def test_averages_do_not_change_what_is_trained(pools: Any, straight: Path, tmp_path: Path) -> None:
    without = values(tmp_path, steps=4)
    del without["optim"]["ema"]

    pools(2).run(run, without)

    assert log_of(tmp_path) == log_of(straight)


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_averages_bit_for_bit(pools: Any, straight: Path, tmp_path: Path) -> None:
    for steps in (2, 4):
        pools(2).run(run, values(tmp_path, steps=steps, start_step=1))

    assert state_differences(tmp_path, straight) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_averages_of_two_ranks_go_on_at_other_numbers_of_ranks(pools: Any, tmp_path: Path, ranks: int) -> None:
    pools(2).run(run, values(tmp_path, steps=2))
    before = saved(tmp_path, 2, "ema.")

    pools(ranks).run(run, values(tmp_path, steps=3))

    expected = followed(before, saved(tmp_path, 3, "model."))
    for name, average in saved(tmp_path, 3, "ema.").items():
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-6, atol=1e-9)


def test_the_averages_are_exported_beside_the_weights(straight: Path) -> None:
    for folder, kind in {"final": "model.", "final-ema": "ema."}.items():
        exported = load_file(straight / "r" / "exports" / folder / "model.safetensors")
        kept = saved(straight, 4, kind)
        assert len(exported) > 10
        for name, tensor in exported.items():
            assert torch.equal(tensor, kept[name]), name


def test_what_is_evaluated_and_exported_instead_is_the_average(pools: Any, straight: Path, tmp_path: Path) -> None:
    chosen = values(
        tmp_path, steps=4, start_step=1, evaluate=True, export="instead", checkpoint={"export_at_end": True}
    )
    chosen["data"] |= {"synthetic": {"task": "sort", "rows": 200}}
    held_out = {"sets": {"held": {"synthetic": {"task": "sort", "rows": 24, "seed": 9}}}, "every_steps": 2}
    chosen["evaluation"] = held_out

    pools(2).run(run, chosen)

    assert log_of(tmp_path) == log_of(straight)  # evaluations left the weights as they were
    told = [line for line in read_metrics(tmp_path / "r" / "metrics.jsonl") if "eval/held/loss" in line]
    for folder, place, agrees in (("final", tmp_path, True), ("final", straight, False)):
        alone = {key: value for key, value in chosen.items() if key != "optim"}
        alone["model"] = {"path": str(place / "r" / "exports" / folder), "tokenizer": "builtin:characters"}
        measured = pools(1).run(evaluate, alone)[0]["eval/held/loss"]
        assert (measured == pytest.approx(told[-1]["eval/held/loss"], rel=1e-5)) is agrees
    assert not (tmp_path / "r" / "exports" / "final-ema").exists()


@pytest.mark.slow
def test_averages_that_come_or_go_at_a_resume_are_declared(pools: Any, tmp_path: Path) -> None:
    pools(2).run(run, values(tmp_path, steps=2))
    without = values(tmp_path, steps=3)
    del without["optim"]["ema"]

    refused = pools(2).errors(run, without)
    without["checkpoint"] |= {"resume": {"drop": ["^ema"]}}
    pools(2).run(run, without)
    refused_again = pools(2).errors(run, values(tmp_path, steps=4))
    pools(2).run(run, values(tmp_path, steps=4, checkpoint={"resume": {"add": ["^ema"]}}))

    assert len({*refused}) == 1
    assert "the checkpoint has averages of the weights, and this run keeps none (optim.ema)" in refused[0][1]
    assert "allow it with resume.drop: ['^ema']" in refused[0][1]
    assert "has no averages of the weights, and this run keeps some (allow it with resume.add" in refused_again[0][1]
    assert saved(tmp_path, 3, "ema.") == {}
    expected = followed(saved(tmp_path, 3, "model."), saved(tmp_path, 4, "model."))
    for name, average in saved(tmp_path, 4, "ema.").items():
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-6, atol=1e-9)


def test_weights_of_16_bits_are_averaged_in_float32_and_come_back_untouched() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    averages = Averages(0.5)
    averages.begin({"w": weight})
    weight.data.fill_(1.0078125)

    averages.update({"w": weight}, 0)

    assert averages.tensors["w"].tolist() == [1.00390625, 1.50390625]
    assert averages.tensors["w"].dtype == torch.float32
    with averages.in_place({"w": weight}):
        assert weight.tolist() == [1.0, 1.5]  # as bfloat16 rounds it
    assert weight.tolist() == [1.0078125, 1.0078125]


@pytest.mark.parametrize("start_step", [0, 2])
def test_averages_follow_an_update_that_was_made_and_no_skipped_one_where_a_tensor_says_which(start_step: int) -> None:
    torch.manual_seed(3)
    weight, plain = nn.Parameter(torch.randn(5, 7)), Averages(0.9, start_step)
    decided = Averages(0.9, start_step)
    for averages in (plain, decided):
        averages.begin({"w": weight})

    for step, skipped in enumerate([False, True, False, True, True, False]):
        if not skipped:
            weight.data += torch.randn(5, 7)
            plain.update({"w": weight}, step)
        decided.update({"w": weight}, step, torch.tensor(skipped))

        assert torch.equal(decided.tensors["w"], plain.tensors["w"])
    assert not torch.equal(decided.tensors["w"], weight)


def exported(place: Path, *words: str) -> dict[str, bytes]:
    """Return the files of what `holdfast checkpoint export` makes of a run's newest checkpoint."""
    output = place / "exported"
    done = CliRunner().invoke(app, ["checkpoint", "export", str(place / "r"), "-o", str(output), *words])
    if done.exception is not None:
        raise done.exception
    return {file.name: file.read_bytes() for file in output.iterdir()}


def files_of(place: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (place).iterdir()}


def test_the_averages_in_a_checkpoint_are_exported_as_the_run_itself_does(straight: Path) -> None:
    found = exported(straight, "--ema")

    assert found == files_of(straight / "r" / "exports" / "final-ema")
    assert found["model.safetensors"] != files_of(straight / "r" / "exports" / "final")["model.safetensors"]
    with pytest.raises(ConfigError, match="--ema writes averages in the place of weights, --format torch"):
        exported(straight, "--ema", "--format", "torch")


@pytest.mark.slow
def test_averages_of_adapters_are_exported_alone_and_merged_as_the_run_itself_does(pools: Any, tmp_path: Path) -> None:
    adapted = values(tmp_path, steps=2, checkpoint={"export_at_end": True})
    adapted["model"] |= {"lora": {"rank": 2}}
    pools(2).run(run, adapted)
    own = tmp_path / "r" / "exports"

    merged = exported(tmp_path, "--ema")
    shutil.rmtree(tmp_path / "exported")
    alone = exported(tmp_path, "--ema", "--adapter")

    assert merged == files_of(own / "final-ema")
    assert alone == files_of(own / "final-ema-adapter")
    assert alone["adapter_model.safetensors"] != files_of(own / "final-adapter")["adapter_model.safetensors"]


def test_averages_that_a_checkpoint_does_not_have_are_refused_by_name(pools: Any, tmp_path: Path) -> None:
    without = values(tmp_path, steps=1)
    del without["optim"]["ema"]
    pools(2).run(run, without)

    with pytest.raises(NoCheckpoint, match=r"step-00000001 has no averages of the weights: its run had no optim\.ema"):
        exported(tmp_path, "--ema")

    assert not (tmp_path / "exported").exists()
