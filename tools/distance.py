"""How far one walks: the files of src that a step, a save and a resume enter.

Two tiny runs of four steps are traced on one rank, `tests/earlier/sft.yaml` and `grpo.yaml`, each begun and then
continued from its checkpoint of step 2. A file counts where one of its functions is called, in any thread: during the
last step, from the last save to its verification, and while the run is continued.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = str(ROOT / "src" / "holdfast") + os.sep
WINDOWS = {
    "step": ("recipes/sft.py:start_sft_step", "recipes/grpo.py:grpo_step"),
    "save": ("training/saving/checkpoints.py:Checkpoints._begin",),
    "resume": ("training/saving/resume.py:go_on",),
}
SAVED = "training/saving/checkpoints.py:Checkpoints.collect"
"""Ends a save, which goes on in a thread, once it returns what is verified."""
START = {"sft step": 28, "grpo step": 60, "grpo save": 30, "grpo resume": 35}
"""When the counting began."""


class Tracer:
    """Notes which files are entered while a window is open; each opening begins anew."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}
        self._open = dict.fromkeys(WINDOWS, 0)

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        """Take one event of `sys.setprofile`."""
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE) or event not in {"call", "return"}:
            return
        file = code.co_filename.removeprefix(SOURCE)
        function = f"{file}:{code.co_qualname}"
        for window, functions in WINDOWS.items():
            if function in functions and not (window == "save" and event == "return"):
                self._turn(window, event)
            if self._open[window] and event == "call":
                self.files[window].add(file)
        if function == SAVED and event == "return" and value:
            self._open["save"] = 0

    def _turn(self, window: str, event: str) -> None:
        if event == "call" and not self._open[window]:
            self.files[window] = set()
        self._open[window] += 1 if event == "call" else -1


@contextlib.contextmanager
def traced() -> Iterator[Tracer]:
    """Trace this thread and all that begin within the block."""
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        yield tracer
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def files_of(verb: str, folder: Path) -> dict[str, set[str]]:
    """Run, go back to step 2 and continue; return the files of each window."""
    from holdfast.config.sections.launch import LaunchConfig
    from holdfast.config.verbs.roots import load_run
    from holdfast.parallel.mesh import joined_world
    from holdfast.recipes import grpo, sft

    recipe: Any = {"sft": sft.sft, "grpo": grpo.grpo}[verb]
    for name in (f"{verb}.yaml", "digits.py"):
        shutil.copy(ROOT / "tests" / "earlier" / name, folder)
    files: dict[str, set[str]] = {}
    for _ in range(2):
        loaded = load_run(folder / f"{verb}.yaml", ["launch.ranks=1", "rewards.workers=1"][: 1 + (verb == "grpo")])
        with joined_world(LaunchConfig(ranks=1, device="cpu")) as world, traced() as tracer:
            recipe(loaded.config, loaded.base, world)
        files |= tracer.files
        shutil.rmtree(folder / "runs" / verb / "checkpoints" / "step-00000004")
    return files


def unseen(files: dict[str, set[str]]) -> list[str]:
    """Return the windows that no call opened: the functions that open them have other names, or nothing calls them."""
    return [window for window in WINDOWS if not files.get(window)]


def main() -> int:
    """Print the table, a trend; return 1 where a window saw nothing."""
    from holdfast.text.quiet import hush

    hush()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    blind = []
    for verb in ("sft", "grpo"):
        silent = contextlib.redirect_stdout(io.StringIO())
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), silent:
            files = files_of(verb, Path(folder))
        for window, entered in files.items():
            start = START.get(f"{verb} {window}")
            print(f"{verb} {window}: {len(entered)} files{'' if start is None else f' ({start} at the start)'}")
            if "--list" in sys.argv:
                print("  " + "\n  ".join(sorted(entered)))
        blind += [f"{verb} {window}" for window in unseen(files)]
    if blind:
        print(f"Nothing was seen of {', '.join(blind)}: no call opened these windows.", file=sys.stderr)
    return 1 if blind else 0


if __name__ == "__main__":
    sys.exit(main())
