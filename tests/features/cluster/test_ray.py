"""A Ray of two raylets places a run's ranks: a run, a killed actor, a killed raylet."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.features.cluster.page import commands, write_run

PYTHON = os.environ.get("HOLDFAST_RAY_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="no Ray here: tools/install_ray.sh DIRECTORY, then make test-ray"),
]
ROOT = Path(__file__).parents[3]
EXAMPLE, GRPO_EXAMPLE = ROOT / "examples" / "sft_sort.yaml", ROOT / "examples" / "grpo_sort.yaml"
SMALL = [
    *("data.synthetic.rows=512", "data.batch_size=8", "evaluation.sets={}", "evaluation.completions=null"),
    *("launch.device=cpu", "checkpoint.every_steps=3"),
]
ENVIRON = {
    **os.environ,
    "PYTHONPATH": str(ROOT / "src"),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Raylets:
    """A head and a second node on this machine."""

    address: str
    head: subprocess.Popen[bytes]
    second: subprocess.Popen[bytes]

    def launch(
        self, base: Path, *overrides: str, ranks: int = 2, address: str | None = None, example: Path = EXAMPLE
    ) -> list[str]:
        """Return the command of a run."""
        options = ["--ranks", str(ranks), "--address", address or self.address]
        values = [*SMALL, f"run.dir={base}", "run.name=run", *overrides]
        return [PYTHON, "-m", "holdfast.cli.main", "launch", "ray", str(example), *options, *values]

    def run(self, base: Path, *overrides: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        command = self.launch(base, *overrides, **options)  # type: ignore[arg-type]
        return subprocess.run(command, env=ENVIRON, cwd=base, capture_output=True, text=True, timeout=240, check=False)


def _start(*options: str) -> subprocess.Popen[bytes]:
    words = ["start", "--block", "--num-cpus", "1", "--disable-usage-stats", "--object-store-memory", "100000000"]
    return subprocess.Popen(
        [PYTHON, "-m", "ray.scripts.scripts", *words, *options],
        env=ENVIRON,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        own = psutil.Process(process.pid)
        return [own, *own.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def raylets() -> Iterator[Raylets]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="hfray", dir="/tmp") as folder:  # noqa: S108 - Ray's sockets need a short path
        head = _start(
            "--head",
            "--port",
            str(port),
            "--include-dashboard=false",
            "--temp-dir",
            folder,
        )
        members = [head]
        try:
            _await(lambda: _nodes(port) == 1, 180)
            second = _start("--address", f"127.0.0.1:{port}")
            members.append(second)
            _await(lambda: _nodes(port) == 2, 180)
            yield Raylets(f"127.0.0.1:{port}", head, second)
        finally:
            families = [each for member in members for each in _family(member)]
            for each in families:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.terminate()
            for each in psutil.wait_procs(families, timeout=10)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            for member in members:
                member.wait(timeout=10)


def _nodes(port: int) -> int:
    code = (
        f"import ray; ray.init(address='127.0.0.1:{port}', logging_level='ERROR', log_to_driver=False);"
        "print(sum(node['Alive'] for node in ray.nodes()))"
    )
    try:
        done = subprocess.run(
            [PYTHON, "-c", code], env=ENVIRON, capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:  # Ray was not there when it asked
        return 0
    return int(done.stdout.strip() or 0) if done.returncode == 0 else 0


def _await(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.2)


def steps(base: Path) -> int:
    metrics = base / "run" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def ranks_of(base: Path) -> dict[str, psutil.Process]:
    """Return the processes of a run's ranks, by number."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if f"run.dir={base}" in words and "sft" in words:
            with_environ = process.environ()
            found[with_environ.get("RANK", "")] = process
    return found


def weights(base: Path) -> bytes:
    (file,) = (base / "run" / "exports").glob("*/model.safetensors")
    return file.read_bytes()


def test_a_run_on_two_raylets_is_the_run_of_one_machine(raylets: Raylets, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()

    done = raylets.run(there, "steps=6")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "done after step 6" in done.stdout
    assert {path.name for path in (there / "run" / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    local = [PYTHON, "-m", "holdfast.cli.main", "sft", str(EXAMPLE), *SMALL, f"run.dir={here}", "run.name=run"]
    subprocess.run([*local, "steps=6"], env=ENVIRON, check=True, capture_output=True, timeout=120)
    assert weights(there) == weights(here)


def test_grpo_on_two_raylets_is_the_run_of_one_machine(raylets: Raylets, tmp_path: Path) -> None:
    taught, here, there = tmp_path / "taught", tmp_path / "here", tmp_path / "there"
    for folder in (taught, here, there):
        folder.mkdir()
    holdfast = [PYTHON, "-m", "holdfast.cli.main"]
    local = [*holdfast, "sft", str(EXAMPLE), *SMALL, f"run.dir={taught}", "run.name=run", "steps=20"]
    subprocess.run(local, env=ENVIRON, check=True, capture_output=True, timeout=120)
    values = ["steps=4", "evaluation.every_steps=null", f"model.path={taught / 'run' / 'exports' / 'final'}"]

    done = raylets.run(there, *values, example=GRPO_EXAMPLE)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "done after step 4" in done.stdout
    local = [*holdfast, "grpo", str(GRPO_EXAMPLE), *SMALL, f"run.dir={here}", "run.name=run", *values]
    subprocess.run(local, env=ENVIRON, check=True, capture_output=True, timeout=120)
    assert weights(there) == weights(here)


@pytest.mark.parametrize("what", ["actor", "raylet"])
def test_what_is_killed_is_named_and_the_same_command_goes_on(raylets: Raylets, tmp_path: Path, what: str) -> None:
    running = subprocess.Popen(
        raylets.launch(tmp_path, "steps=5000"), env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _await(lambda: steps(tmp_path) >= 5, 120)

    ranks = ranks_of(tmp_path)
    victim = ranks["1"].parent()
    if what == "raylet":
        victim = victim.parent()
        assert "raylet" in victim.name()
    victim.kill()
    out, err = running.communicate(timeout=120)

    assert running.returncode == 3, out + err
    assert "Rank 1 on" in err
    assert "The same command starts the run again" in out + err
    assert "Traceback" not in out + err
    _await(lambda: not ranks_of(tmp_path), 30)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    failed = next(event for event in events if event["event"] == "failed")
    assert failed["rank"] == 1
    assert failed["host"] == socket.gethostname()
    if what == "actor":
        again = raylets.run(tmp_path, f"steps={steps(tmp_path) + 3}")
        assert again.returncode == 0, again.stdout + again.stderr


def test_the_ranks_that_are_left_go_on_from_the_last_checkpoint(raylets: Raylets, tmp_path: Path) -> None:
    command = raylets.launch(tmp_path, "steps=60", "launch.min_ranks=1")
    running = subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _await(lambda: steps(tmp_path) >= 5, 240)

    ranks_of(tmp_path)["1"].kill()
    reached, killed = steps(tmp_path), time.monotonic()
    _await(lambda: ranks_of(tmp_path).keys() == {"0"} and steps(tmp_path) > reached, 240)
    print(f"{time.monotonic() - killed:.1f} s to more lines of steps than before")
    out, err = running.communicate(timeout=300)

    assert running.returncode == 0, out + err
    assert "1 of 2 ranks" in err
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["ranks"] for event in events if event["event"] == "start"] == [2, 1]


def test_ctrl_c_saves_and_ends_with_3(raylets: Raylets, tmp_path: Path) -> None:
    running = subprocess.Popen(
        raylets.launch(tmp_path, "steps=5000"), env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _await(lambda: steps(tmp_path) >= 2, 120)

    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=120)

    assert running.returncode == 3, out + err
    assert "stopped by Ctrl-C" in out
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 3}, "3 ranks need 3 CPUs, 1 each, and this Ray has 2"),
        ({"values": ["launch.min_ranks=3"]}, "min_ranks=3"),
        ({"address": "127.0.0.1:1"}, "No Ray answers at --address 127.0.0.1:1"),
    ],
)
def test_a_run_that_ray_has_no_place_for_is_refused(
    raylets: Raylets, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    done = raylets.run(tmp_path, "steps=6", *options.pop("values", ()), **options)

    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_of_the_page_runs_as_it_stands(raylets: Raylets, tmp_path: Path) -> None:
    write_run(tmp_path / "page", EXAMPLE, [*SMALL, "steps=2", "run.dir=runs"])
    (line,) = commands("Ray")
    environ = ENVIRON | {"RAY_ADDRESS": raylets.address, "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"}

    done = subprocess.run(
        ["bash", "-c", line],
        env=environ,
        cwd=tmp_path / "page",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "done after step 2" in done.stdout
