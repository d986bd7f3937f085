"""What a path leads to, told from names and small files.

A path of no known kind is `UNKNOWN`, and whoever was asked to read it says what is wrong with it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from holdfast import registry
from holdfast.errors import ConfigError
from holdfast.files import expanded, is_lfs_pointer, read_json


class PathKind(StrEnum):
    """A kind of path, in the words of a message."""

    RUN = "the directory of a run"
    RUNS = "a directory of runs"
    CHECKPOINT = "a checkpoint"
    CHECKPOINTS = "a run's directory of checkpoints"
    EXPORT = "an exported model"
    ADAPTER = "a directory of adapters in peft's format"
    MODEL = "a Hugging Face model directory"
    FOREIGN_CHECKPOINT = "a checkpoint of another system"
    WEIGHTS = "a file of weights"
    MODEL_CONFIG = "the configuration file of a model"
    RUN_FILE = "the configuration file of a run"
    FOREIGN_CONFIG = "a configuration file of another system"
    RECORD = "a file that a run wrote"
    CHECKPOINT_FILE = "a part of a checkpoint"
    ROWS = "a file of rows"
    ROWS_DIRECTORY = "a directory of rows"
    LFS_POINTER = "a git-lfs pointer"
    SCRIPT = "a script"
    UNKNOWN = "something else"


K = PathKind


@dataclass(frozen=True)
class Recognised:
    """A path, its kind, and what sentences about it may cite."""

    path: str
    kind: PathKind
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def noun(self) -> str:
        """Return the kind, with the command or the system where these are known."""
        if self.kind is K.RUN and "verb" in self.facts:
            return f"{self.kind} of `holdfast {self.facts['verb']}`"
        if self.kind is K.FOREIGN_CONFIG:
            return f"a configuration file of {self.facts['title']}"
        if self.kind is K.LFS_POINTER and self.facts["file"] != self.path:
            return f"a directory in which {self.facts['file']} is {self.kind}"
        return str(self.kind)


def recognise(path: str | Path) -> Recognised:
    """Return the kind of a local path; `UNKNOWN` where nothing is there, or nobody can look."""
    text = str(path)
    local_path = expanded(text)
    kind, facts = K.UNKNOWN, dict[str, str]()
    with contextlib.suppress(OSError):
        if "://" not in text and "\0" not in text:
            if local_path.is_dir():
                kind, facts = _directory(local_path)
            elif local_path.is_file():
                kind, facts = _file(local_path)
    return Recognised(text.rstrip("/") or text, kind, facts)


_STEP = re.compile(r"step-\d{8,}")
_MOST_ENTRIES = 1000
_OF_OTHERS = re.compile(
    r"model_world_size_\d+_rank_\d+\.pt|.*\.distcp|trainer_state\.json|global_step_\d+|latest_checkpointed_iteration\.txt"
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
_ROW_FILES = (".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv")
_SCRIPTS = (".py", ".ipynb", ".sh")
_CONFIGURATIONS = (".yaml", ".yml", ".json")
_OF_A_RUN = ("metrics.jsonl", "events.jsonl", "run.json", "versions.json", "plan.json", "report.html", "samples.jsonl")
_OF_A_CHECKPOINT = ("manifest.json", "trainer.json")
_TENSORS = "tensors"
"""Folder of a checkpoint."""

Kind = tuple[PathKind, dict[str, str]]


def _directory(directory: Path) -> Kind:
    names = set()
    for entry, _ in zip(directory.iterdir(), range(_MOST_ENTRIES), strict=False):
        names.add(entry.name)
    if _is_run(directory, names):
        return K.RUN, _facts_of_run(directory)
    if "manifest.json" in names and {_TENSORS, "dcp"} & names:  # dcp: a format that `checkpoint convert` takes
        return K.CHECKPOINT, _run_above(directory, 2)
    if directory.name == _TENSORS and recognise(directory.parent).kind is K.CHECKPOINT:
        return K.CHECKPOINT_FILE, {"checkpoint": str(directory.parent)}
    if any(_STEP.fullmatch(name) for name in names):
        return K.CHECKPOINTS, _run_above(directory, 1)
    return _model_directory(directory, names) or _other_directory(directory, names)


def _model_directory(directory: Path, names: set[str]) -> Kind | None:
    if {"config.json", "adapter_config.json"} & names:
        stored = [name for name in sorted(names) if name.endswith((*_WEIGHTS, ".json", ".model"))]
        pointer = next((name for name in stored if is_lfs_pointer(directory / name)), None)
        if pointer is not None:
            return K.LFS_POINTER, _pointer_facts(directory / pointer)
    if "adapter_config.json" in names and "config.json" not in names:
        return K.ADAPTER, _facts_of_adapter(directory)
    ours = names & {"holdfast.yaml", "holdfast_export.json"}
    if ours or ("config.json" in names and _is_model_config(directory / "config.json")):
        return (K.EXPORT, _run_above(directory, 2)) if ours else (K.MODEL, {})
    return None


def _other_directory(directory: Path, names: set[str]) -> Kind:
    if any(_OF_OTHERS.fullmatch(name) for name in names):
        return K.FOREIGN_CHECKPOINT, {}
    below = [directory / name for name in sorted(names) if not name.startswith(".")]
    if any((entry / "run.json").is_file() and _is_run(entry, {"run.json"}) for entry in below):
        return K.RUNS, {}
    if any(entry.name.endswith(_ROW_FILES) for entry in below):
        return K.ROWS_DIRECTORY, {}
    return K.UNKNOWN, {}


def _part(file: Path) -> Kind | None:
    """Tell a file of a run or of a checkpoint by its name and by what it is in; None of any other."""
    for names, kind, above in ((_OF_A_RUN, K.RECORD, K.RUN), (_OF_A_CHECKPOINT, K.CHECKPOINT_FILE, K.CHECKPOINT)):
        if file.name in names and recognise(file.parent).kind is above:
            return kind, {"run": str(file.parent), "checkpoint": str(file.parent)}
    if file.parent.name == _TENSORS and recognise(file.parent).kind is K.CHECKPOINT_FILE:
        return K.CHECKPOINT_FILE, {"checkpoint": str(file.parent.parent)}
    return None


def _file(file: Path) -> Kind:
    if is_lfs_pointer(file):
        return K.LFS_POINTER, _pointer_facts(file)
    part = _part(file)
    if part is not None:
        return part
    if file.name.endswith(_WEIGHTS):
        return K.WEIGHTS, {}
    if file.name.endswith(_SCRIPTS):
        return K.SCRIPT, {}
    if file.name == "config.json" and _is_model_config(file):
        return K.MODEL_CONFIG, {}
    if file.name.endswith(_ROW_FILES) or file.name.endswith(".jsonl.gz"):
        return K.ROWS, {}
    return _configuration(file) if file.name.endswith(_CONFIGURATIONS) else (K.UNKNOWN, {})


def _configuration(file: Path) -> Kind:
    """Tell our configuration files from those of other systems by whose keys they have more of."""
    from holdfast.config.verbs.roots import verb_of
    from holdfast.config.yaml12 import parse_file

    try:
        values = parse_file(file).values
    except ConfigError:
        return K.UNKNOWN, {}
    keys = set(_dotted(values))
    ours = len(keys & _own_keys())
    has_sections = any(isinstance(values.get(name), Mapping) for name in ("model", "data"))
    if has_sections and 2 * ours >= len(keys):
        return K.RUN_FILE, {"verb": verb_of(values), **_run_of_file(file, values)}
    foreign = registry.load(registry.FOREIGN_CONFIGURATION)(keys, more_than=ours)
    return (K.FOREIGN_CONFIG, foreign) if foreign else (K.UNKNOWN, {})


def _run_of_file(file: Path, values: Mapping[str, Any]) -> dict[str, str]:
    section = values.get("run")
    section = section if isinstance(section, Mapping) else {}
    directory = Path(str(section.get("dir", "runs"))) / str(section.get("name", file.stem))
    run = {"run": str(directory)} if _is_run(directory, {"run.json"}) else {}
    return {"expected": str(directory), **run}


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every key that has no keys below it."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@cache
def _own_keys() -> frozenset[str]:
    from holdfast.config.tree import all_keys
    from holdfast.config.verbs.roots import ROOTS

    return frozenset(key for root in ROOTS.values() for key in all_keys(root))


def _pointer_facts(file: Path) -> dict[str, str]:
    return {"file": str(file), "size": f"{file.stat().st_size} bytes"}


def _is_run(directory: Path, names: set[str]) -> bool:
    return "run.json" in names and "run_id" in _mapping(directory / "run.json")


def _facts_of_run(run: Path) -> dict[str, str]:
    verb = _mapping(run / "run.json").get("verb")
    facts = {"verb": verb} if isinstance(verb, str) else {}
    exports = {"model": run / "exports" / "final", "adapter": run / "exports" / "final-adapter"}
    facts |= {name: str(path) for name, path in exports.items() if path.is_dir()}
    steps = sorted(path for path in (run / "checkpoints").glob("step-*") if _STEP.fullmatch(path.name))
    return facts | ({"newest": str(steps[-1])} if steps else {})


def _run_above(path: Path, levels: int) -> dict[str, str]:
    """Return the run that a checkpoint or an export lies in, if it still does."""
    directory = path
    for _ in range(levels):
        directory = directory.parent if directory.name else directory.absolute().parent
    if not _is_run(directory, {"run.json"}):
        return {}
    verb = _mapping(directory / "run.json").get("verb")
    return {"run": str(directory)} | ({"verb": verb} if isinstance(verb, str) else {})


def _facts_of_adapter(directory: Path) -> dict[str, str]:
    base = _mapping(directory / "adapter_config.json").get("base_model_name_or_path")
    facts = {"base": base} if isinstance(base, str) and base else {}
    merged = directory.with_name(directory.name.removesuffix("-adapter"))
    return facts | ({"merged": str(merged)} if merged != directory and merged.is_dir() else {})


def _is_model_config(file: Path) -> bool:
    return bool({"model_type", "architectures"} & _mapping(file).keys())


def _mapping(file: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one where there is none."""
    with contextlib.suppress(OSError, ValueError):
        values = read_json(file)
        return values if isinstance(values, dict) else {}
    return {}
