"""The SIGTERM drill: a rank that would not notice a preemption is named before it costs anything."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training.control import StopRequests
from tests.cli.fixtures import TINY, write_rows, write_run
from tests.crash.processes import run_doomed


def drilled(world: World, deaf: int, how: str) -> tuple[list[int], str | None]:
    """Make one rank deaf as libraries do, then drill; return who was deaf, and whether a stop was asked for."""
    ranks = RankGroup()
    with StopRequests() as requests:
        if world.rank == deaf:
            match how:
                case "another handler":
                    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
                case "the default":
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                case "ignored below Python":
                    import ctypes

                    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))  # SIG_IGN; Python is not told
        found = requests.drill(ranks)
        return found, requests.pending(ranks)


@pytest.mark.parametrize(
    ("deaf", "how"),
    [
        (0, "another handler"),
        (2, "the default"),
        (2, "ignored below Python"),
        pytest.param(2, "another handler", marks=pytest.mark.slow),
        pytest.param(0, "the default", marks=pytest.mark.slow),
        pytest.param(0, "ignored below Python", marks=pytest.mark.slow),
    ],
)
def test_the_drill_names_the_deaf_rank_on_every_rank_and_ends_nobody(how: str, deaf: int) -> None:
    ended = run_doomed(drilled, 3, deaf, how)

    assert [(end.code, end.value, end.error) for end in ended] == [(0, ([deaf], None), None)] * 3


def test_where_every_rank_hears_nobody_is_named_and_no_stop_is_asked_for() -> None:
    ended = run_doomed(drilled, 2, 7, "nothing")

    assert [(end.code, end.value) for end in ended] == [(0, ([], None))] * 2


def hears_a_second_one(world: World) -> str | None:
    """Let a real SIGTERM follow the drill's, while another rank is late."""
    ranks = RankGroup()
    with StopRequests() as requests:
        if world.rank == 1:
            requests._drilling = True
            os.kill(os.getpid(), signal.SIGTERM)  # the drill's own
            os.kill(os.getpid(), signal.SIGTERM)  # the scheduler's
        asked = requests.pending(ranks)
        return None if asked is None else asked.text


def test_a_sigterm_that_comes_while_ranks_drill_is_not_taken_for_the_drill_s() -> None:
    ended = run_doomed(hears_a_second_one, 2)

    assert [end.value for end in ended] == ["stopped by SIGTERM"] * 2


LOSS = """
import os, signal
from holdfast.objectives.supervised import NegativeLogLikelihood

class Loss(NegativeLogLikelihood):
    def token_terms(self, logprobs, entropy, part):
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().token_terms(logprobs, entropy, part)

def make():
    return Loss()
"""


BLOCKS = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.executable, sys.argv[1:])
"""
"""Becomes another program that inherits the mask, in all its threads."""


def write(folder: Path, **sections: Any) -> None:
    write_rows(folder / "rows.jsonl", [{"prompt": f"add {n}=", "completion": str(n)} for n in range(12)])
    (folder / "loss.py").write_text(LOSS)
    tree: dict[str, Any] = {
        "steps": 4,
        "run": {"dir": "."},
        "model": {"config": TINY, "tokenizer": "builtin:characters"},
        "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 32, "tokens_per_micro_batch": 64},
        "launch": {"ranks": 2, "device": "cpu"},
    }
    write_run(folder / "run.yaml", tree | sections)


def ranks_of(folder: Path, *, blocked: int | None) -> list[tuple[int, str]]:
    """Start two ranks as torchrun does, one of them with SIGTERM blocked; return exit codes and what they said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in (0, 1):
        command = [sys.executable, "-m", "holdfast.cli.main", "sft", "run.yaml"]
        if rank == blocked:
            command = [sys.executable, "-c", BLOCKS, *command]
        environ = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(
            subprocess.Popen(
                command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    told = [process.communicate(timeout=120)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, told, strict=True)]


@pytest.mark.slow
def test_a_run_with_a_rank_that_blocks_sigterm_is_refused_before_step_1(tmp_path: Path) -> None:
    write(tmp_path)

    ended = ranks_of(tmp_path, blocked=1)

    assert [code for code, _ in ended] == [2, 2], ended
    assert "SIGTERM does not reach rank 1: something replaced its handler, or blocks it" in ended[0][1]
    assert "Traceback" not in ended[0][1]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_handler_that_the_user_s_loss_replaces_in_step_1_is_told_after_it_with_the_step_saved(tmp_path: Path) -> None:
    write(tmp_path, objective={"kind": "path", "path": "loss.py:make"})

    ended = ranks_of(tmp_path, blocked=None)

    assert [code for code, _ in ended] == [2, 2], ended
    assert "SIGTERM does not reach rank 1: something replaced its handler" in ended[0][1]
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "manifest.json").exists()
