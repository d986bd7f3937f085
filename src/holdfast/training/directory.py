"""The run directory: created only when every check before step 1 has passed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.config.base import Section
from holdfast.config.public import WHOLE, public_configuration
from holdfast.config.verbs.training import as_plain
from holdfast.config.versions import versions
from holdfast.config.yaml12 import to_yaml
from holdfast.errors import ConfigError
from holdfast.files import append_text, is_there, naming, parse_json, read_bytes, read_json, read_text

IDENTITY, EVENTS, PLAN, LOGS, PAGE = "run.json", "events.jsonl", "plan.json", "logs", "report.html"
COMPLETIONS = "completions"
MEMORY = "memory"
"""Name of an event with `device` and `peaks`: the largest memory of rank 0 so far in each phase, in bytes.

On a CPU it is resident memory; `start` is its size before the model was built."""
_LONGEST_LOG = 2**34
CHECKPOINTS = "checkpoints"
"""As FOLDER in `checkpoint.place.layout`; repeated here because that package imports torch."""


def run_directory(config: Any) -> Path:
    """Return where a run writes; a dry run has a place of its own, and leaves a real run's alone."""
    name = f".{config.run.name}.dry-run" if config.dry_run else str(config.run.name)
    return Path(config.run.dir) / name


def checkpoint_place(directory: Path, config: Any) -> str | Path:
    """Return where the checkpoints of the run in a directory are; a dry run leaves checkpoint.storage alone too."""
    return directory / CHECKPOINTS if config.dry_run else config.checkpoint.storage or directory / CHECKPOINTS


def count_starts(directory: Path) -> int:
    """Return how often a run has begun to train; a start that was refused, or had nothing to do, is not counted."""
    path = directory / EVENTS
    return path.read_bytes().count(b'"event": "start"') if path.is_file() else 0


def check_writable(directory: Path) -> None:
    """Refuse a place that cannot be written, or that holds something else than a run.

    Raises:
        ConfigError: Nothing could be written there.
    """
    with refusing(directory):
        _check_writable(directory)


def check_verb(directory: Path, verb: str) -> None:
    """Refuse a directory with a run of another command.

    Raises:
        ConfigError: A run of another command is there; the message says how to begin with its model.
    """
    recorded = _recorded(directory, "verb")
    if isinstance(recorded, str) and recorded != verb:
        raise ConfigError(
            f"{directory} is the directory of a run of `holdfast {recorded}`, and `holdfast {verb}` cannot continue "
            f"it. Choose another run.name. `holdfast checkpoint export {directory} -o DIR` makes a model of it, and "
            "model.path=DIR begins with that."
        )


@contextlib.contextmanager
def refusing(directory: Path) -> Iterator[None]:
    """Say which key is wrong where the system refuses a directory: a file on the way, a name that is too long."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"run.dir={directory.parent} cannot be written: {error}.\nName another directory.") from error


def _check_writable(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file. Choose another run.dir or run.name.")
    # What an evaluation or a plan before the run leaves is no reason to refuse the run.
    expected = {CHECKPOINTS, LOGS, COMPLETIONS, PLAN}
    foreign_names = {entry.name for entry in directory.iterdir()} - expected if directory.exists() else set()
    foreign = directory / CHECKPOINTS
    if foreign.is_dir() and any(not entry.name.startswith((".", "step-", "pins")) for entry in foreign.iterdir()):
        foreign_names.add(CHECKPOINTS)
    if foreign_names and not (directory / IDENTITY).exists():
        raise ConfigError(f"{directory} holds other things than a run. Choose another run.dir or run.name.")
    ancestor = directory
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not os.access(ancestor, os.W_OK):
        raise ConfigError(f"{ancestor} cannot be written by this user. Choose another run.dir.")


def create(
    directory: Path, config: Section, verb: str, run_id: str | None = None, parent: dict[str, Any] | None = None
) -> None:
    """Create the directory, or refresh the descriptions in one that exists.

    Args:
        directory: Of the run.
        config: The whole tree.
        verb: Of the command.
        run_id: Of a run whose run.json was lost.
        parent: What the run starts from; recorded once.
    """
    from holdfast.checkpoint.place.storage import make_durably

    with refusing(directory):
        make_durably(directory)
    identity = directory / IDENTITY
    if run_id is not None or not is_there(identity):
        fields = {"run_id": run_id or uuid.uuid4().hex, "verb": verb, "format": 1, "parent": parent}
        _write(identity, json.dumps(fields, indent=2) + "\n")
    _write(directory / "config.resolved.yaml", resolved_yaml(config))
    _write(directory / "versions.json", json.dumps(versions(), indent=2) + "\n")


def save_plan(directory: Path, plan: dict[str, Any]) -> None:
    """Leave what `holdfast plan` says beside a run, or where one will be, without command lines of servers.

    Their flags may be secret.

    Raises:
        ConfigError: Nothing can be written there.
    """
    with refusing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        public = {key: value for key, value in plan.items() if key != "servers"}
        _write(directory / PLAN, json.dumps(public, indent=2) + "\n")


def is_run(directory: Path) -> bool:
    """Return whether a run lives here."""
    return (directory / IDENTITY).exists()


def is_blank(directory: Path) -> bool:
    """Return whether run.json is there and holds nothing, as a power cut leaves a file that nobody flushed."""
    path = directory / IDENTITY
    return path.exists() and not read_bytes(path).strip(b"\0 \n")


def run_id(directory: Path) -> str:
    """Return the identity of the run in a directory.

    Raises:
        ConfigError: Somebody else wrote run.json, or it is damaged.
    """
    path = directory / IDENTITY
    try:
        return str(read_json(path)["run_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not what Holdfast writes ({error!r}). Choose another run.dir or run.name."
        ) from error


def parent(directory: Path) -> dict[str, Any] | None:
    """Return what the run in a directory started from, as run.json has it."""
    recorded_parent: dict[str, Any] | None = _recorded(directory, "parent")
    return recorded_parent


def _recorded(directory: Path, key: str) -> Any:
    """Return a value of run.json; None where it has none or cannot be read, of which `run_id` says what is wrong."""
    try:
        return read_json(directory / IDENTITY).get(key)
    except (OSError, ValueError, AttributeError):
        return None


def last_saved(directory: Path) -> int | None:
    """Return the newest step that a run said is on disk, None if it never did."""
    return max((int(event["saved"]) for event in events(directory, "checkpoint")), default=None)


def events(directory: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a name from events.jsonl, oldest first."""
    path = directory / EVENTS
    for line in read_text(path, _LONGEST_LOG).splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # a kill may tear the last line
            event = parse_json(line)
            if event.get("event") == name:
                yield event


def note_saved(directory: Path, step: int) -> None:
    """Append to events.jsonl that a checkpoint was saved before an error ended the run."""
    line = json.dumps({"event": "checkpoint", "step": step, "saved": step, "before_error": True}) + "\n"
    append_text(directory / EVENTS, line)


def resolved_yaml(config: Section) -> str:
    """Return the whole tree as YAML, defaults included; it can be run as it is."""
    return to_yaml(as_plain(config))


def portable_yaml(config: Section) -> str:
    """Return the whole tree as YAML for checkpoints and exports, without what could be secret."""
    return to_yaml(public_configuration(as_plain(config), WHOLE))


def remove(directory: Path) -> None:
    """Remove a run directory (a dry run's)."""
    shutil.rmtree(directory, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    """Write a file in one step; its bytes are on the disk before its name is, which a power cut would empty else."""
    from holdfast.checkpoint.place.storage import LocalStorage

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with naming(temporary), temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        # Some file systems write a rename to the disk before the file's data; after a power cut the new name is then
        # empty.
        os.fsync(file.fileno())
    temporary.replace(path)
    LocalStorage(path.parent).sync("")
