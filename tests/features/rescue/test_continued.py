"""What was imported goes on: in a run of dpo, in one of grpo, and from weights alone as what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from holdfast.errors import HoldfastError
from tests.cli.warm import WarmPython
from tests.features.rescue.reading import place_of, truth_of
from tests.features.rescue.test_import import imported, run_file, stored_at, tokens

__all__ = ["tokens"]  # a fixture of these tests, too


def command_of(said: str) -> list[str]:
    """Return the command that an import says to go on with."""
    line = next(line for line in said.splitlines() if line.startswith("continue it: holdfast "))
    return line.removeprefix("continue it: holdfast ").split()


def continued(said: str, warm: WarmPython, folder: Path) -> str:
    done = warm.run("-m", "holdfast.cli.main", *command_of(said), cwd=folder)
    assert done.code == 0, done.out + done.err
    return done.out


def of_verb(folder: Path, tokens: Path, verb: str) -> Path:
    """Return the file of a run of dpo or grpo whose rows are generated words."""
    words = [f"w{2 + number % 17}" for number in range(40)]
    rows: list[dict[str, Any]] = [{"prompt": f"{word} w3", "chosen": "w4 w5", "rejected": "w6"} for word in words]
    changes: dict[str, Any] = {"preference": {"loss": {"kind": "dpo"}}}
    if verb == "grpo":
        rows = [{"prompt": f"{word} w3"} for word in words]
        (folder / "reward.py").write_text("def length(completion):\n    return float(len(completion) % 3)\n")
        changes = {
            "rollout": {"group_size": 2, "max_new_tokens": 4},
            "reward": [{"path": "reward.py:length"}],
        }
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = run_file(folder, tokens, data__path=str(folder / "rows.jsonl"))
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["dpo", "grpo"])
def test_a_run_of_another_verb_continues_what_was_imported(
    fixtures: Path, tokens: Path, verb: str, warm: WarmPython, tmp_path: Path
) -> None:
    file = of_verb(tmp_path, tokens, verb)

    said = imported(place_of(fixtures / "verl-fsdp2"), "--as", file)
    printed = continued(said, warm, tmp_path)

    assert command_of(said)[0] == verb
    assert "resuming from step 2" in printed
    assert "done after step 4" in printed


@pytest.mark.slow
def test_weights_alone_are_continued_as_what_they_are(
    fixtures: Path, tokens: Path, warm: WarmPython, tmp_path: Path
) -> None:
    """Report 003: what was saved without an optimizer is never taken for a run that goes on."""
    file = run_file(tmp_path, tokens, model__freeze=[])

    said = imported(place_of(fixtures / "lightning-mp-weights"), "--as", file)
    stored = stored_at(Path(command_of(said)[-1].removeprefix("checkpoint.init_from=")))
    printed = continued(said, warm, tmp_path)

    assert stored.manifest.contents == ("model",)
    for name, value in truth_of(fixtures / "lightning-mp-weights")["model"].items():
        assert torch.equal(stored.read(f"model.{name}"), value), name
    assert "it holds weights alone: the run begins at step 0 with a new optimizer" in said
    assert "weights from" in printed
    assert "a new run starts at step 0" in printed
    assert "done after step 4" in printed


def test_weights_alone_are_not_written_over_what_is_there(fixtures: Path, tokens: Path, tmp_path: Path) -> None:
    file = run_file(tmp_path, tokens, model__freeze=[])
    imported(place_of(fixtures / "lightning-mp-weights"), "--as", file)

    with pytest.raises(HoldfastError, match="is there already"):
        imported(place_of(fixtures / "lightning-mp-weights"), "--as", file)
