"""Write the archives of this folder anew: `python tests/earlier/record.py`, for a release or another format alone.

Each run makes four steps at once, which gives the expected numbers; the archive has it as it was after step 2.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from holdfast import __version__

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "holdfast.cli.main"]
RUN_FILES = ("config.resolved.yaml", "run.json", "versions.json")


def record(verb: str, folder: Path) -> None:
    """Run a verb in an empty folder, and write its archive."""
    for file in (f"{verb}.yaml", "digits.py"):
        shutil.copy(HERE / file, folder)
    subprocess.run([*COMMAND, verb, f"{verb}.yaml"], cwd=folder, check=True)
    directory, run, expected = folder / "runs" / verb, folder / "run", folder / "expected"
    saved = Path("checkpoints/step-00000002")
    shutil.copytree(directory / saved, run / saved)
    expected.mkdir()
    for name in RUN_FILES:
        shutil.copy(directory / name, run)
    for name in ("metrics.jsonl", "events.jsonl"):
        lines = (directory / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(line for line in lines if json.loads(line).get("step", 9) <= 2))
    shutil.copy(directory / "metrics.jsonl", expected)
    subprocess.run([*COMMAND, "checkpoint", "export", str(run / saved), "-o", "step-2"], cwd=folder, check=True)
    exports = {"step-2": folder / "step-2"} | {
        path.name: path for path in sorted((directory / "exports").glob("final*")) if path.is_dir()
    }
    for name, path in exports.items():
        shutil.copy(path / "model.safetensors", expected / f"{name}.safetensors")
    with tarfile.open(HERE / f"{verb}-{__version__}.tar.xz", "w:xz") as archive:
        for path in (run, expected):
            archive.add(path, path.name)


if __name__ == "__main__":
    for verb in ("sft", "grpo"):
        with tempfile.TemporaryDirectory() as folder:
            record(verb, Path(folder))
