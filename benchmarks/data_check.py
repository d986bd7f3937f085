"""`holdfast data check` beside tokenising the same rows alone: CPU seconds, and memory as rows grow.

    python benchmarks/data_check.py [ROWS] [MANY]

Both arms take turns in one process, nine times, and begin by turns; the median ratio decides: at most 1.2. Then the
peak of resident memory of a process each for 10,000 rows and for MANY (default 1,000,000): at most 64 MiB apart.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import heading

MODEL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FEW, MOST_MIB, MOST_RATIO = 10_000, 64, 1.2


def written(folder: Path, rows: int) -> Path:
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": f"add {n} and 1=", "completion": str(n + 1)}) + "\n" for n in range(rows))
    tree = {
        "steps": 1, "model": {"config": MODEL, "tokenizer": "builtin:characters"},
        "data": {"path": str(folder / "rows.jsonl"), "max_length": 32},
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(tree), encoding="utf-8")
    return folder / "run.yaml"


def tokenise_alone(run: Path) -> None:
    from holdfast.config.verbs.roots import load_run
    from holdfast.data.rows.rows import open_source
    from holdfast.models.files.origin import load_tokenizer
    from holdfast.training.run import ConfiguredRun
    from holdfast.training.setup.rows import row_tokeniser

    loaded = load_run(run, [])
    section = loaded.config.data.all_sources()[0]
    source = open_source(section, loaded.base)
    tokenizer = load_tokenizer(loaded.config.model, loaded.base)
    setting = ConfiguredRun(config=loaded.config, base=loaded.base)
    tokenise = row_tokeniser(setting, tokenizer, {source.name: section.rows})
    for index in range(source.size or 0):
        tokenise(source.row(index), index, source.name, f"{source.name} row {index}")


def check(run: Path) -> None:
    from holdfast.cli.commands.data.survey import check_data

    with contextlib.redirect_stdout(io.StringIO()):
        check_data(run, [], as_json=False)


def cpu_seconds(arm: Callable[[Path], None], run: Path) -> float:
    began = time.process_time()
    arm(run)
    return time.process_time() - began


def peak_mib(rows: int) -> float:
    """Return the most resident memory of a process that checks so many rows."""
    with tempfile.TemporaryDirectory() as folder:
        run = written(Path(folder), rows)
        program = (
            "import sys; sys.path.insert(0, sys.argv[2]); import data_check; data_check.check_and_say(sys.argv[1])"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(run), str(Path(__file__).parent)],
            capture_output=True,
            text=True,
            check=True,
        )
    return float(done.stdout.splitlines()[-1])


def check_and_say(run: str) -> None:
    check(Path(run))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    many = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    print(heading())
    print("| round | tokenising alone, CPU s | data check, CPU s | ratio |\n|---|---|---|---|")
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        run = written(Path(folder), rows)
        tokenise_alone(run)
        check(run)
        for number in range(9):
            arms: list[Callable[[Path], None]] = [tokenise_alone, check]
            order = arms if number % 2 else arms[::-1]
            seconds = {arm: cpu_seconds(arm, run) for arm in order}
            alone, checked = seconds[tokenise_alone], seconds[check]
            ratios.append(checked / alone)
            print(f"| {number + 1} | {alone:.2f} | {checked:.2f} | {ratios[-1]:.3f} |", flush=True)
    ratio = statistics.median(ratios)
    print(f"median ratio {ratio:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}", flush=True)
    few_mib, many_mib = peak_mib(FEW), peak_mib(many)
    print(
        f"peak of {FEW:,} rows {few_mib:.0f} MiB, of {many:,} rows {many_mib:.0f} MiB: {many_mib - few_mib:.0f} apart"
    )
    sys.exit(0 if ratio <= MOST_RATIO and many_mib - few_mib <= MOST_MIB else 1)


if __name__ == "__main__":
    check_and_say(sys.argv[2]) if sys.argv[1:2] == ["--peak"] else main()
