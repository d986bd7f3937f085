"""CPU threads of a rank: who names them, how many cores there are, and what a resumed run uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config.load import from_mapping
from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import ConfigError
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.forms import Candidate, Forms
from holdfast.parallel.mesh import World
from holdfast.parallel.threads import choose_threads, given_threads
from holdfast.processor import bfloat16_unit, usable_cores
from tests.cli.fixtures import HOLDFAST


@pytest.mark.parametrize(
    ("key", "variable", "threads"),
    [
        ("auto", None, None),
        ("auto", "3", 3),
        ("auto", "4,2", 4),
        ("auto", "many", None),
        ("auto", "0", None),
        (2, "8", 2),
        (2, None, 2),
    ],
)
def test_a_key_wins_over_a_variable(key: Any, variable: str | None, threads: int | None) -> None:
    launch = LaunchConfig(threads_per_rank=key)

    assert given_threads(launch, {} if variable is None else {"OMP_NUM_THREADS": variable}) == threads


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, 64),
        ({"a": "max 100000"}, 64),
        ({"a": "50000 100000"}, 1),
        ({"a": "350000 100000"}, 3),
        ({"a": "800000 100000", "a/b": "250000 100000"}, 2),
        ({"": "200000 100000", "a/b": "max 100000"}, 2),
        ({"a": "nonsense"}, 64),
        ({"a": "100000 0"}, 64),
    ],
)
def test_control_groups_take_cores_away(tmp_path: Path, limits: dict[str, str], cores: int) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    (groups / "a/b").mkdir(parents=True)
    own.write_text("12:cpu:/old\n0::/a/b\n")
    for path, text in limits.items():
        (groups / path / "cpu.max").write_text(f"{text}\n")

    assert usable_cores(groups, own) == min(cores, len(os.sched_getaffinity(0)))


def test_an_affinity_of_one_core_is_one_core() -> None:
    code = "from holdfast.processor import usable_cores; print(usable_cores())"
    first = min(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(first), sys.executable, "-c", code]

    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)

    assert found.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("flags", "unit"),
    [("fpu avx512_bf16 amx_bf16", "AMX"), ("fpu avx512_bf16", "AVX512-BF16"), ("fpu avx2 amx_bf", ""), (None, "")],
)
def test_the_unit_that_multiplies_bfloat16_is_named(tmp_path: Path, flags: str | None, unit: str) -> None:
    file = tmp_path / "cpuinfo"
    if flags is not None:
        file.write_text(f"processor\t: 0\nflags\t\t: {flags}\nprocessor\t: 1\nflags\t\t: fpu\n")

    assert bfloat16_unit(file) == unit


def resumed(recorded: dict[str, int], share: int) -> tuple[int, list[str]]:
    used: list[int] = []
    forms = Forms()
    wins = [(1.0, 2.0)] * 3
    takes = lambda threads: threads <= share  # noqa: E731 - as the candidate has it
    forms.choose(Candidate("threads", used.append, str, lambda: wins, share, is_timed=True, takes=takes))
    lines = forms.resume(recorded)
    return used[-1], lines


@pytest.mark.parametrize(
    ("recorded", "share", "threads", "notes"),
    [
        ({"threads": 4}, 4, 4, 0),
        ({"threads": 2}, 4, 2, 1),  # told, and no sum changes
        ({"threads": 0}, 4, 0, 1),
        ({}, 4, 0, 1),  # of a run on one thread
        ({"threads": 8}, 4, 4, 1),  # impossible here
    ],
)
def test_a_resumed_run_has_the_threads_that_it_began_with(
    recorded: dict[str, int], share: int, threads: int, notes: int
) -> None:
    found, lines = resumed(recorded, share)

    assert found == threads
    assert len(lines) == notes
    assert any("may differ" in line for line in lines) is (recorded.get("threads") == 8)


def chosen(world: World, named: list[int | None], before: int | None = None) -> tuple[Any, int, list[str]]:
    ranks = RankGroup(1.0)
    forms = Forms(ranks.gather)
    standing = choose_threads(forms, ranks, "here", named=named[world.rank], before=before)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return None if standing is None else standing.value, threads, sorted(forms.standings)


@pytest.mark.parametrize("named", [[None, 1], [1, None], [1, 1]])
def test_threads_that_one_rank_names_are_chosen_on_none(pools: Any, named: list[int | None]) -> None:
    assert pools(2).run(chosen, named) == [(None, 1, [])] * 2


def test_named_threads_are_recorded_where_there_are_several(pools: Any) -> None:
    assert pools(2).run(chosen, [3, 3]) == [(None, 1, ["threads"])] * 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize(("before", "threads"), [(0, 1), (2, 2)])
def test_recorded_threads_are_used_untimed(pools: Any, before: int, threads: int) -> None:
    assert pools(1).run(chosen, [None], before) == [(before, threads, ["threads"])]


def test_zero_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"threads_per_rank: 0"):
        from_mapping({"threads_per_rank": 0}, LaunchConfig)


def test_threads_are_those_of_before_when_ranks_part() -> None:
    from holdfast.parallel.mesh import joined_world

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with joined_world(LaunchConfig(threads_per_rank=1, device="cpu")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_run_without_a_word_takes_its_cores_and_its_resume_the_same(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    example = Path("examples/sft_sort.yaml").resolve()
    command = [str(HOLDFAST), "sft", str(example), "checkpoint.every_steps=3", "launch.ranks=1"]
    for steps in (3, 5):
        subprocess.run([*command, f"steps={steps}"], cwd=tmp_path, env=environ, check=True, timeout=300)
    straight = tmp_path / "straight"
    straight.mkdir()
    subprocess.run([*command, "steps=5"], cwd=straight, env=environ, check=True, timeout=300)

    (run,), (other,) = (sorted(folder.glob("runs/*")) for folder in (tmp_path, straight))
    chosen = {name: [event["value"] for event in lines(name, "events.jsonl", "form")] for name in (run, other)}
    if not chosen[run]:
        pytest.skip("one core")
    losses = {name: [row["loss"] for row in lines(name, "metrics.jsonl", "loss")] for name in (run, other)}
    assert len(losses[run]) == 5
    if chosen[run][0] == chosen[other][0]:  # both first starts measured alike
        assert losses[run] == losses[other]


def lines(run: Path, name: str, column: str) -> list[dict[str, Any]]:
    read = map(json.loads, (run / name).read_text().splitlines())
    return [line for line in read if column in line and line.get("form", "threads") == "threads"]
