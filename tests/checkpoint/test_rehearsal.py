"""The rehearsal changes nothing and finds before step 1 what would fail hours later."""

from __future__ import annotations

import random
import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from holdfast import checkpoint
from holdfast.checkpoint.format.snapshot import hold, take
from holdfast.checkpoint.place.layout import TENSORS
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.checkpoint.saving.rehearsal import (
    CheckpointCounts,
    RehearsalReport,
    copy_and_pinning_seconds,
    run_rehearsal,
)
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.recipes.sft import sft
from holdfast.training.setup.begin import Live
from tests.checkpoint.cases import build, contents, optimizer_of, step
from tests.crash.disks import Remount, disk
from tests.crash.processes import run_doomed
from tests.training.cases import tree

__all__ = ["disk"]


def train(world: World, directory: str, kind: str, rehearsed: bool) -> tuple[list[float], dict[str, Any], list[float]]:
    """Train three steps; return losses, what is there then, and what every random generator draws next."""
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    np.random.seed(world.rank)
    toy = build(world)
    optimizer = optimizer_of(toy, kind)
    if rehearsed:
        toy(torch.ones(2, 5)).sum().backward()
        before = contents(toy, optimizer)
        checkpoint.rehearse(directory, toy, optimizer)
        assert contents(toy, optimizer) == before
        optimizer.zero_grad()
    losses = [step(world, toy, optimizer, number) for number in range(2)]
    if rehearsed:
        checkpoint.rehearse(directory, toy, optimizer)
    losses.append(step(world, toy, optimizer, 2))
    drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
    return losses, contents(toy, optimizer), drawn


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad"], ids="49-saved before the first step, {}".format)
def test_training_is_bit_identical_with_and_without_a_rehearsal(pools: Any, tmp_path: Path, kind: str) -> None:
    with_it = pools(2).run(train, str(tmp_path / "c"), kind, True)
    without = pools(2).run(train, str(tmp_path / "c"), kind, False)

    assert with_it == without
    assert list((tmp_path / "c").iterdir()) == []


class FullLater(LocalStorage):
    """A disk that is full by the time a file is written."""

    def create(self, path: str) -> Any:  # type: ignore[override]
        if f"/{TENSORS}/" in path:
            raise OSError(28, "No space left on device", path)
        return super().create(path)


def rehearse_on_full_disk(world: World, root: str, steps: int) -> None:
    toy = build(world)
    run_rehearsal(FullLater(Path(root)), toy, optimizer_of(toy), RankGroup(), trained_steps=steps)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (0, ("The rehearsal before the first step failed", "Nothing was trained. Mend this first")),
        (7, ("The rehearsal after step 7 failed", "Nothing was trained after step 7. Mend this first")),
    ],
)
def test_a_rehearsal_says_what_was_trained_before_it(
    pools: Any, tmp_path: Path, steps: int, words: tuple[str, str]
) -> None:
    for name, message in pools(2).errors(rehearse_on_full_disk, str(tmp_path), steps):
        assert name == "RehearsalFailed"
        assert all(each in message for each in words)


def rehearse_at(world: World, roots: list[str], keep: int = 3) -> RehearsalReport:
    """Rehearse with a root of this rank's own."""
    toy = build(world)
    return run_rehearsal(
        LocalStorage(Path(roots[world.rank])), toy, optimizer_of(toy), RankGroup(), counts=CheckpointCounts(keep)
    )


@pytest.mark.parametrize("ranks", [pytest.param(2, id="18-directory that is not one for all ranks")])
def test_a_directory_that_one_rank_sees_elsewhere_is_refused_naming_the_rank(
    pools: Any, tmp_path: Path, ranks: int
) -> None:
    errors = pools(ranks).errors(rehearse_at, [str(tmp_path / "a"), str(tmp_path / "b")])

    for name, message in errors:
        assert name == "RehearsalFailed"
        assert "is not one directory for all ranks: what rank 0 on " in message
        assert "is not there for rank 1 on " in message
        assert "Set run.dir to a shared file system, or checkpoint.storage to an object store." in message
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("keep", [pytest.param(1000, id="18-no room for the checkpoints that will be kept")])
def test_a_disk_too_small_for_what_will_be_kept_is_refused(pools: Any, disk: tuple[Path, Remount], keep: int) -> None:
    place, _ = disk

    errors = pools(2).errors(rehearse_at, [str(place)] * 2, keep)

    assert errors[0] == errors[1]
    assert errors[0][0] == "RehearsalFailed"
    assert f"{keep} are kept and two more must fit" in errors[0][1]
    assert "lower checkpoint.keep.last" in errors[0][1]
    assert list(place.iterdir()) == []


@dataclass
class Unwritable:
    """A hyper-parameter of a type that nobody knows."""

    value: int = 3


def rehearse_odd_optimizer(world: World, directory: str, where: str) -> None:
    toy = build(world)
    optimizer = optimizer_of(toy)
    if where == "group":
        optimizer.param_groups[0]["odd"] = Unwritable()
    elif where == "state":
        step(world, toy, optimizer, 0)
        next(iter(optimizer.state.values()))["odd"] = Unwritable()
    else:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(7))]})
    checkpoint.rehearse(directory, toy, optimizer)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        pytest.param("group", "hyper-parameter 'odd' is a tests.checkpoint.test_rehearsal.Unwritable", id="in a group"),
        pytest.param("state", "state 'odd' of blocks.0.", id="in the state of a parameter"),
        pytest.param("stranger", "holds a parameter of shape [7] that is not the model's", id="not the model's"),
    ],
)
def test_an_optimizer_that_cannot_be_saved_is_refused_before_the_first_step(
    pools: Any, tmp_path: Path, where: str, message: str
) -> None:
    errors = pools(2).errors(rehearse_odd_optimizer, str(tmp_path), where)

    assert errors[0] == errors[1]
    assert errors[0][0] == "UnsavableOptimizer"
    assert message in errors[0][1]
    assert list(tmp_path.iterdir()) == []


def test_a_rehearsal_measures_and_leaves_nothing(pools: Any, tmp_path: Path) -> None:
    report = pools(2).run(rehearse_at, [str(tmp_path)] * 2)[0]

    assert report.bytes_ > 1000
    assert report.save_seconds > 0
    assert report.load_seconds > 0
    assert report.outline["optim.blocks.0.trained.weight.exp_avg"][0] == (5, 5)
    assert list(tmp_path.iterdir()) == []


def test_the_line_of_a_rehearsal_tells_the_wait_of_every_save_from_the_pinning_that_happens_once() -> None:
    def line(report: RehearsalReport) -> str:
        return report.describe(ranks=1, background=True)

    on_device = RehearsalReport(2**20, 0.16, 2.0, 3.0, {}, pinning_seconds=6.64)

    assert "(training waits 0.16 s, after 6.64 s once to pin host memory)" in line(on_device)
    assert "(training waits 0.16 s)" in line(replace(on_device, pinning_seconds=0.0))


def test_a_copy_on_the_host_pins_nothing() -> None:
    model = torch.nn.Linear(4, 4)

    seconds, pinning_seconds = copy_and_pinning_seconds(take(hold(model), None))

    assert seconds > 0
    assert pinning_seconds == 0.0


def growth_of_a_rehearsal(world: World, directory: str, trained: bool) -> tuple[int, int]:
    """Return the peak of this rank's resident memory in a rehearsal, less that before it, and the bytes of its state.

    The kernel keeps the peak (VmHWM), and forgets it where 5 is written to clear_refs.
    """
    process = Path("/proc/self")
    model = fully_shard(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(32))))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.rehearse(directory, torch.nn.Linear(3, 3))  # what a first rehearsal imports is no state
    if trained:
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = int((process / "statm").read_text().split()[1]) * resource.getpagesize()
    (process / "clear_refs").write_text("5")

    checkpoint.rehearse(directory, model, optimizer)

    peak = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM"))
    values = sum(parameter.to_local().nbytes for parameter in model.parameters())  # type: ignore[attr-defined]
    return int(peak.split()[1]) * 1024 - before, 3 * values


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "share"), [(False, 2 / 3), (True, 0)], ids=["zeros of the optimizer", "no state"])
def test_a_rehearsal_holds_no_copy_of_the_state(tmp_path: Path, trained: bool, share: float) -> None:
    """Before the first step it holds the state that the optimizer lacks, which is 2/3 of AdamW's; never a copy."""
    ended = run_doomed(growth_of_a_rehearsal, 2, str(tmp_path), trained)

    assert [(end.code, end.error) for end in ended] == [(0, None)] * 2
    for grown, state in (end.value for end in ended):
        assert state == 3 * 64 * 2**20
        assert grown <= (share + 0.1) * state + 16 * 2**20


@pytest.mark.gpu
def test_memory_that_a_first_copy_from_a_gpu_pins_is_kept_for_the_next() -> None:
    model = torch.nn.Linear(8192, 8192, device="cuda")

    (_, first), (_, second) = (copy_and_pinning_seconds(take(hold(model), None)) for _ in range(2))

    assert 0 <= second < first


class UnwritableTokenizer(PreTrainedTokenizerFast):
    """A tokenizer whose vocabulary is nowhere in a file, as some of the hub's own are."""

    def save_pretrained(self, *args: Any, **options: Any) -> Any:
        raise ValueError("this tokenizer cannot be written")


def train_with_a_tokenizer_that_cannot_be_written(world: World, directory: str) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.__class__ = UnwritableTokenizer
    values = tree(directory)
    section = {key: value for key, value in values["model"]["config"].items() if key != "model_type"}
    values["model"] = {"path": "(given in Python)"}
    live = Live(model=LlamaForCausalLM(LlamaConfig(**section)), tokenizer=tokenizer)
    return sft(from_mapping(values, SFTConfig), Path(), world, live)


def test_a_tokenizer_that_cannot_be_written_is_refused_before_the_first_step(pools: Any, tmp_path: Path) -> None:
    errors = pools(2).errors(train_with_a_tokenizer_that_cannot_be_written, str(tmp_path))

    assert errors[0] == errors[1]
    assert errors[0][0] == "RehearsalFailed"
    assert "ValueError: this tokenizer cannot be written. Nothing was trained." in errors[0][1]
    assert list(tmp_path.iterdir()) == []


def rehearse_with(world: World, directory: str, extra: Any, rank_extra: list[Any]) -> None:
    toy = build(world)
    checkpoint.rehearse(directory, toy, optimizer_of(toy), extra, rank_extra=rank_extra[world.rank])


@pytest.mark.parametrize(
    ("extra", "rank_extra"),
    [({"loader": [object()]}, [1, 2]), ({}, [1, {"iterator": object()}])],
    ids=["extra", "rank_extra of one rank"],
)
def test_extra_that_has_no_written_form_is_refused_on_all_ranks_before_the_first_step(
    pools: Any, tmp_path: Path, extra: Any, rank_extra: list[Any]
) -> None:
    errors = pools(2).errors(rehearse_with, str(tmp_path / "c"), extra, rank_extra)

    assert errors[0] == errors[1]
    assert errors[0][0] == "UnsavableExtra"
    assert "extra holds a builtins.object, which has no written form" in errors[0][1]
    assert not (tmp_path / "c").exists()
