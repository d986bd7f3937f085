"""A state beside the tensors that fits its hashes and is none of ours: refused before anything live is touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.format.manifest import _HASH_KEY, NAME, _canonical
from holdfast.checkpoint.format.settings import settings_of
from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, contents, optimizer_of, save_after
from tests.checkpoint.damage import rewrite_manifest
from tests.crash.runs import values_of
from tests.training.cases import run

Forge = Callable[[Any], Any]


def within(*path: str, value: Any) -> Forge:
    """Return what sets one entry; a value of `...` deletes it."""

    def forge(content: Any) -> Any:
        *above, last = path
        inner = content
        for name in above:
            inner = inner[name]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
        return content

    return forge


OF_A_RUN: list[tuple[str, Forge, str]] = [
    ("trainer.json", lambda _: [], "it is no object"),
    ("trainer.json", lambda _: {}, "state is missing"),
    ("trainer.json", within("state", value=[1]), "state is [1]: Input should be a dictionary"),
    ("trainer.json", within("state", "step", value="2"), "state.step is '2': Input should be a valid integer"),
    ("trainer.json", within("state", "step", value=-1), "state.step is -1: Input should be greater than or equal to 0"),
    ("trainer.json", within("state", "step", value=1), "state.step is 1, and the checkpoint is of step 2"),
    ("trainer.json", within("state", "strange", value=0), "state.strange is 0: Unexpected keyword argument"),
    ("trainer.json", within("state", "tokens", value=True), "state.tokens is True: Input should be a valid integer"),
    (
        "trainer.json",
        within("state", "best_exported", value="much"),
        "state.best_exported is 'much': Input should be a valid number",
    ),
    (
        "trainer.json",
        within("state", "controllers", value={"kl": 0.1, "x": []}),
        "state.controllers.x is []: Input should be a valid number",
    ),
    ("trainer.json", within("stream", value=...), "stream is missing"),
    (
        "trainer.json",
        within("stream", "cursor", "draw", value=2.5),
        "stream.cursor.draw is 2.5: Input should be a valid integer",
    ),
    ("trainer.json", within("stream", "cursor", "offset", value=...), "stream.cursor.offset is missing"),
    ("trainer.json", within("stream", "seen", value=[]), "stream.seen is []: List should have at least 2 items"),
    ("rank/replicate-0.shard-1.json", within("random", value=...), "'random' is missing"),
    ("rank/replicate-0.shard-1.json", within("random", "torch", value="AAAA"), ""),
    ("rank/replicate-0.shard-1.json", within("random", "numpy", value=["MT19937", "AAAA", 0, 0, 0.0]), ""),
    ("rank/replicate-0.shard-1.json", within("random", "python", value=[3, [1, 2], None]), ""),
]


def resume_each(world: World, values: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Resume one after the other, and return what each raised."""
    found = []
    for each in values:
        try:
            run(world, each)
        except Exception as error:  # noqa: BLE001 - which one, is the question
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("nothing", ""))
    return found


@pytest.mark.slow
def test_a_run_refuses_a_forged_state_by_name_and_keeps_the_checkpoint(pools: Any, tmp_path: Path) -> None:
    first = tmp_path / "first"
    pools(2).run(run, values_of(first, steps=2))
    copies = []
    for number, (file, forge, _) in enumerate(OF_A_RUN):
        copy = Path(shutil.copytree(first, tmp_path / str(number)))
        saved = copy / "r" / "checkpoints" / "step-00000002"
        (saved / file).write_text(json.dumps(forge(json.loads((saved / file).read_text()))))
        rewrite_manifest(saved)
        copies.append(copy)

    refused = pools(2).run(resume_each, [values_of(copy, steps=4) for copy in copies])

    assert refused[0] == refused[1]
    for (file, _, words), (name, said), copy in zip(OF_A_RUN, refused[0], copies, strict=True):
        assert name == "CheckpointCorrupt", (file, said)
        assert words in said
        assert "although its hash fits" in said
        assert ("trainer.json" if file == "trainer.json" else "a rank's own state") in said
        checkpoint.verify(str(copy / "r" / "checkpoints" / "step-00000002"))


def load_each(world: World, paths: list[str]) -> list[tuple[str, bool]]:
    """Load one after the other into live objects; return what each raised, and whether all stayed as it was."""
    toy = build(world, seed=1)
    optimizer = optimizer_of(toy)
    before, chance = contents(toy, optimizer), torch.get_rng_state()
    found = []
    for path in paths:
        try:
            checkpoint.load(path, toy, optimizer)
        except CheckpointCorrupt as error:
            untouched = contents(toy, optimizer) == before and torch.equal(torch.get_rng_state(), chance)
            found.append((str(error), untouched))
    return found


def test_a_loop_s_forged_state_is_refused_on_all_ranks_and_nothing_live_is_touched(pools: Any, tmp_path: Path) -> None:
    pools(2).run(save_after, str(tmp_path / "first"), 1)
    forged: list[tuple[str, Forge]] = [
        ("trainer.json", lambda _: 3),
        ("trainer.json", within("extra", value={"tensor": ["float32", [3], "AAAA"]})),
        ("trainer.json", within("extra", value={"unheard": 1})),
        ("rank/shard-1.json", within("extra", value={"tuple": 5})),
        ("rank/shard-0.json", lambda _: []),
        ("rank/shard-1.json", within("random", "torch", value=None)),
    ]
    paths = []
    for number, (file, forge) in enumerate(forged):
        copy = Path(shutil.copytree(tmp_path / "first", tmp_path / f"step-{number:08d}" / "x"))
        (copy / file).write_text(json.dumps(forge(json.loads((copy / file).read_text()))))
        rewrite_manifest(copy)
        paths.append(str(copy))
    (tmp_path / "lost").mkdir()
    lacking = Path(shutil.copytree(tmp_path / "first", tmp_path / "lost" / "x"))
    (lacking / "rank/shard-1.json").rename(lacking / "rank/other.json")
    rewrite_manifest(lacking)

    found = pools(2).run(load_each, [*paths, str(lacking)])

    assert found[0] == found[1]
    assert [untouched for _, untouched in found[0]] == [True] * 7
    assert all("is not what was written there, although its hash fits" in said for said, _ in found[0][:6])
    assert "lacks rank/rank-00001.json, the own state of rank 1" in found[0][6][0]


@pytest.mark.parametrize("steps", [4])
def test_a_state_that_lacks_what_a_later_version_remembers_is_continued(pools: Any, tmp_path: Path, steps: int) -> None:
    pools(2).run(run, values_of(tmp_path, steps=2))
    saved = tmp_path / "r" / "checkpoints" / "step-00000002"
    file = saved / "trainer.json"
    file.write_text(json.dumps(within("state", "unscored_in_a_row", value=...)(json.loads(file.read_text()))))
    rewrite_manifest(saved)

    outcomes = pools(2).run(run, values_of(tmp_path, steps=steps))

    assert [outcome.step for outcome in outcomes] == [steps, steps]


def delete(content: Any, path: tuple[str | int, ...]) -> None:
    *above, last = path
    for name in above:
        content = content[name]
    del content[last]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (("optimizer", "kind"), "'kind' is missing"),
        (("optimizer", "groups"), "'groups' is missing"),
        (("optimizer", "values"), "'values' is missing"),
        (("optimizer", "groups", 0, "parameters"), "'parameters' is missing"),
        (("optimizer", "groups", 0, "hyperparameters"), "'hyperparameters' is missing"),
        (("files", "trainer.json", "hash"), "hash"),
        (("tensors",), "tensors"),
        (("mesh",), "mesh"),
    ],
)
def test_a_manifest_that_lacks_an_entry_is_refused_by_its_name(
    pools: Any, tmp_path: Path, path: tuple[str | int, ...], said: str
) -> None:
    """Its hash is made anew, as somebody who repairs a manifest by hand would."""
    place = tmp_path / "step-00000001"
    pools(2).run(save_after, str(place), 1)
    outer = json.loads((place / NAME).read_text())
    delete(outer["manifest"], path)
    (place / NAME).write_bytes(_canonical({**outer, _HASH_KEY: hash_bytes(_canonical(outer["manifest"]))}))

    with pytest.raises(CheckpointCorrupt, match=said):
        checkpoint.verify(str(place))


@pytest.mark.parametrize("lacking", ["run", "run.name", "model", "checkpoint", "checkpoint.keep"])
def test_a_configuration_that_lacks_a_section_is_refused_by_its_name(lacking: str) -> None:
    tree: dict[str, Any] = {"run": {"name": "a"}, "model": {}, "checkpoint": {"keep": {}}}
    delete(tree, tuple(lacking.split(".")))

    with pytest.raises(CheckpointCorrupt, match=rf"x/holdfast.yaml is not what a run writes.*: it lacks {lacking}\."):
        settings_of(json.dumps(tree).encode(), "x/holdfast.yaml")
