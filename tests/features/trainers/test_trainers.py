"""In a Trainer, Lightning and TRL: a save that is killed leaves the one before, and the resume is bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WITHOUT_TRL = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="needs TRL; make bench installs it")


def started(script: str, *words: str) -> list[subprocess.Popen[str]]:
    """Start two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(HERE.parents[2]),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *words],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def result_of(script: str, *words: str) -> dict[str, Any]:
    """Run two ranks to their end; return the JSON line of the first."""
    ranks = started(script, *words)
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    lines = [line for line in outputs[0].splitlines() if line.startswith("{") and line.endswith("}") and '"' in line]
    answers = [json.loads(line) for line in lines if line.startswith(('{"lines"', '{"error"'))]
    assert answers, outputs[0]
    answer: dict[str, Any] = answers[-1]
    return answer


def killed_in_save(script: str, folder: Path, step: str, *words: str) -> Path:
    """Run two ranks, and send SIGKILL when a step's files begin to appear; return what was being written."""
    ranks = started(script, str(folder), *words)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            # Not rglob, for which a directory that the rehearsal takes away meanwhile is an error.
            places = [Path(at) / name for at, names, _ in os.walk(folder) for name in names]
            being_written = [each for each in places if each.name.startswith(".staging-") and step in str(each)]
            if being_written:
                for rank in ranks:
                    rank.send_signal(signal.SIGKILL)
                return being_written[0]
            if all(rank.poll() is not None for rank in ranks):
                raise AssertionError(ranks[0].communicate()[0])
            time.sleep(0.0005)
        raise AssertionError("nothing was saved")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "trainer",
        pytest.param("trl", marks=WITHOUT_TRL),
    ],
)
def test_a_trainer_killed_in_a_save_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    flags = ("wide",) if kind == "trainer" else ("wide", "trl")
    straight = result_of("trainer_script.py", str(tmp_path / "straight"), *flags)

    left = killed_in_save("trainer_script.py", tmp_path / "killed", "checkpoint-4", *flags)
    resumed = result_of("trainer_script.py", str(tmp_path / "killed"), "resume", *flags)

    assert left.parent.name == "checkpoint-4"
    assert resumed["lines"][0][0] in {3, 5}  # 5, where the save had been committed when the signal came
    assert resumed["lines"] == straight["lines"][resumed["lines"][0][0] - 1 :]
    assert resumed["there"] == straight["there"]


@pytest.mark.slow
def test_a_trainer_without_the_plug_in_resumes_as_before(tmp_path: Path) -> None:
    straight = result_of("trainer_script.py", str(tmp_path), "plain")
    for file in (tmp_path / "checkpoint-6").iterdir():
        if file.is_file():
            file.unlink()
    for folder in sorted((tmp_path / "checkpoint-6").rglob("*"), reverse=True):
        folder.unlink() if folder.is_file() else folder.rmdir()
    (tmp_path / "checkpoint-6").rmdir()

    resumed = result_of("trainer_script.py", str(tmp_path), "plain", "resume")

    assert resumed["lines"] == straight["lines"][4:]


@pytest.mark.slow
def test_the_best_model_of_files_that_are_not_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    outputs = [rank.communicate(timeout=240)[0] for rank in started("trainer_script.py", str(tmp_path), "best")]

    assert all("Leave load_best_model_at_end out" in output for output in outputs), outputs[0]
    assert not any("at 1\n" in output for output in outputs)


needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="tools/test_rescue.sh runs it where Lightning is installed"
)


@needs_lightning
@pytest.mark.parametrize("kind", ["mp", "fsdp"])
def test_lightning_killed_in_a_save_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    straight = result_of("lightning_script.py", str(tmp_path / "straight"), kind, "wide", "frozen")

    killed_in_save("lightning_script.py", tmp_path / "killed", "step=4", kind, "wide", "frozen")
    newest = next(
        path
        for step in (4, 2)
        if (path := tmp_path / "killed" / f"sstep={step}.ckpt").exists() and (path / "manifest.json").exists()
    )
    resumed = result_of("lightning_script.py", str(tmp_path / "killed"), kind, "wide", "frozen", f"resume={newest}")

    assert resumed["lines"] == straight["lines"][resumed["lines"][0][0] :]


@needs_lightning
def test_what_a_hook_of_lightning_adds_is_rehearsed_before_the_first_step(tmp_path: Path) -> None:
    outputs = [rank.communicate(timeout=240)[0] for rank in started("lightning_script.py", str(tmp_path), "mp", "odd")]

    assert all('"error": "UnsavableExtra"' in output for output in outputs), outputs[0]
    assert not any("at 1\n" in output for output in outputs)
    assert not list(tmp_path.rglob("*.ckpt"))


@needs_lightning
@pytest.mark.parametrize("kind", ["mp", "fsdp"])
def test_lightning_keeps_the_last_and_the_best_and_refuses_to_go_on_from_weights(kind: str, tmp_path: Path) -> None:
    both = result_of("lightning_script.py", str(tmp_path / "both"), kind, "last", "top2")
    weights = result_of("lightning_script.py", str(tmp_path / "weights"), kind, "weights")

    refused = result_of(
        "lightning_script.py", str(tmp_path / "weights"), kind, f"resume={tmp_path}/weights/sstep=4.ckpt"
    )

    assert both["there"] == ["last.ckpt", "sstep=4.ckpt", "sstep=6.ckpt"]
    assert weights["there"] == ["sstep=2.ckpt", "sstep=4.ckpt", "sstep=6.ckpt"]
    assert refused["error"] == "CheckpointMismatch"
    assert "save_weights_only" in refused["words"]
    assert "Nothing was changed" in refused["words"]
