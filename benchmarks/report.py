"""The page of a long run, and what watching one costs.

    python benchmarks/report.py [--steps 100000] [--samples 20000] [--metrics 60] [--rounds 3]

A run directory with so many steps and completions is written. Its page is built in a process of its own: bytes,
processor seconds and peak memory. Chromium opens it (tools/install_browser.sh): processor seconds of the page until
the first chart and the first completions are there, and wall seconds beside them. `holdfast watch` then follows a run
that makes two steps a second for a minute, in a terminal of 120 columns: its processor's share after the first frame.
The worst round counts.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from measure import heading

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser.driver import driving, missing  # noqa: E402 - the folder above is on the path from here on
from tests.features.report.cases import RunFolder, long_run  # noqa: E402

MOST_MEGABYTES, MOST_SECONDS, MOST_MIB, MOST_OPENING, MOST_SHARE = 15.0, 30.0, 1024.0, 3.0, 0.01
WATCHED_SECONDS, SETTLING_SECONDS = 60.0, 8.0
READY = "return document.querySelector('#chart-0 svg') && document.querySelector('#list details')"


def build(run: Path, page: Path) -> dict[str, float]:
    """Return what building the page took, wall seconds included."""
    script = "import sys; from holdfast.cli.main import main; main()"
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", script, "report", str(run), "-o", str(page)])
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    cpu = usage.ru_utime + usage.ru_stime
    return {"seconds": time.monotonic() - began, "cpu": cpu, "peak_mib": usage.ru_maxrss / 1024}


def opening(page: Path) -> dict[str, float]:
    """Return how long Chromium works on the page, and waits for it."""
    with driving() as browser:
        browser.size(1400)
        began = time.monotonic()
        browser.open(page)
        browser.wait_for(READY, 60)
        return {"cpu": browser.work_seconds(), "seconds": time.monotonic() - began}


def watching(folder: Path) -> dict[str, float]:
    """Return the processor seconds of `holdfast watch` until it has settled, and its share afterwards."""
    run = RunFolder(folder, "watched", steps=1_000_000)
    run.start(0)
    run.steps(1, 2000)
    (run.place / "checkpoints").mkdir()
    lease = {"host": "another host", "pid": 1, "time": time.time()}
    step = 2000
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 120, 0, 0))
    (run.place / "checkpoints/.lease-00000001.json").write_text(json.dumps(lease))  # held elsewhere, so it goes on
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", "watch", str(run.place)],
        stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(slave)
    began = time.monotonic()
    settled: float | None = None
    frames = 0
    try:
        while (now := time.monotonic() - began) < SETTLING_SECONDS + WATCHED_SECONDS:
            step += 1
            run.steps(step, step)
            (run.place / "checkpoints/.lease-00000001.json").touch()
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                if select.select([master], [], [], 0.05)[0]:
                    frames += os.read(master, 1 << 16).count(b"numbers")
            if settled is None and now >= SETTLING_SECONDS:
                settled, frames = _cpu(process.pid), 0
        assert settled is not None
        assert process.poll() is None, "it ended by itself"
        return {"start_cpu": settled, "share": (_cpu(process.pid) - settled) / WATCHED_SECONDS, "frames": frames}
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--metrics", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(heading())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, page = long_run(folder, options.steps, options.samples, options.metrics).place, folder / "page.html"
        size = sum((run / file).stat().st_size for file in ("metrics.jsonl", "samples.jsonl"))
        words = f"{options.steps:,} steps of {options.metrics} metrics, {options.samples:,} completions"
        print(f"{words}: {size / 1e6:.0f} MB")
        built = [build(run, page) for _ in range(options.rounds)]
        ok = [_show("page, MB", [page.stat().st_size / 1e6], MOST_MEGABYTES)]
        ok.append(_show("processor seconds to build it", [each["cpu"] for each in built], MOST_SECONDS))
        print(f"      wall seconds: {_each(built, 'seconds')}")
        ok.append(_show("peak MiB of building it", [each["peak_mib"] for each in built], MOST_MIB))
        if missing():
            print(f"      not opened: {missing()}")
        else:
            opened = [opening(page) for _ in range(options.rounds)]
            ok.append(_show("processor seconds until it is open", [each["cpu"] for each in opened], MOST_OPENING))
            print(f"      wall seconds, the driver's included: {_each(opened, 'seconds')}")
        watched = watching(folder)
        ok.append(_show("share of a core that watch takes", [watched["share"]], MOST_SHARE))
        print(f"      {watched['frames']:.0f} frames in {WATCHED_SECONDS:.0f} s; {watched['start_cpu']:.2f} s to start")
    sys.exit(not all(ok))


def _each(rounds: list[dict[str, float]], name: str) -> str:
    return ", ".join(f"{values[name]:.2f}" for values in rounds)


def _show(what: str, values: list[float], most: float) -> bool:
    fine = max(values) <= most
    each = " ".join(f"{value:.3g}" for value in values)
    print(
        f"{'ok  ' if fine else 'MISS'}  {what}: worst {max(values):.3g} (target <= {most:g}; rounds {each})", flush=True
    )
    return fine


if __name__ == "__main__":
    main()
