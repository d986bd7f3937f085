"""What a path is, by its name or by the marker files in a directory, for a refusal that names what takes it.

A path of no kind is left to its reader, which says what is wrong with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from enum import Enum
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from holdfast import registry
from holdfast.errors import ConfigError
from holdfast.files import expanded, is_lfs_pointer

_ROWS = ("*.jsonl", "*.jsonl.gz", "*.ndjson", "*.parquet", "*.arrow", "*.csv", "*.tsv")


class _Row(NamedTuple):
    noun: str
    """The kind in a message."""
    use: str = ""
    """Commands and keys that take a path of it; `{parent}` is the directory that the path is in."""
    markers: tuple[str, ...] = ()
    """Any of these is in a directory of this kind; several names with spaces between are all in it."""
    names: tuple[str, ...] = ()
    """Names of files of this kind."""


class PathKind(Enum):
    """A kind of path; the first counts whose markers or names fit."""

    RUN = _Row(
        "the directory of a run",
        "`holdfast report {path}` shows it, {path}/config.resolved.yaml is its configuration, {path}/exports has its "
        "models, and `holdfast checkpoint export {path} -o DIR` makes one.",
        ("run.json config.resolved.yaml",),
    )
    CHECKPOINT = _Row(
        "a checkpoint",
        "`holdfast checkpoint show {path}` describes it, `holdfast checkpoint export {path} -o DIR` makes a model of "
        "it, and checkpoint.init_from={path} begins a run with its weights.",
        ("manifest.json tensors", "manifest.json dcp"),  # dcp: a format that `checkpoint convert` takes
    )
    GGUF = _Row(
        "an exported model as a GGUF file",
        "llama.cpp and programs that are built on it load the file in {path}, and `holdfast push {path} OWNER/NAME` "
        "publishes it.",
        ("holdfast_export.json *.gguf",),
    )
    EXPORT = _Row(
        "an exported model",
        "`holdfast eval {path}` and `holdfast generate {path}` use it, and model.path={path} begins a run with it.",
        ("holdfast_export.json config.json",),
    )
    MODEL = _Row(
        "a Hugging Face model directory",
        "`holdfast model check {path}` looks at it, and model.path={path} begins a run with it.",
        ("config.json *.safetensors", "config.json *.bin", "config.json tokenizer*"),
    )
    ADAPTER = _Row(
        "a directory of adapters in peft's format",
        "model.lora.path={path} begins a run with them, and model.path names the model below them; `holdfast push "
        "{path} OWNER/NAME` publishes them.",
        ("adapter_config.json",),
    )
    ROWS = _Row(
        "a data set",
        "data.path={path} reads its rows, and `holdfast init --model MODEL --data {path}` writes the file of such a "
        "run.",
        _ROWS,
        _ROWS,
    )
    CHECKPOINTS = _Row(
        "a run's directory of checkpoints",
        "`holdfast checkpoint ls {path}` lists them, and `holdfast checkpoint export {path} -o DIR` makes a model of "
        "the newest.",
        ("step-*/manifest.json",),
    )
    RUNS = _Row("a directory of runs", "`holdfast runs ls {path}` lists them.", ("*/config.resolved.yaml",))
    WEIGHTS = _Row(
        "a file of weights",
        "`holdfast checkpoint check {path}` looks at it; a run begins with its directory: model.path={parent}.",
        names=("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf"),
    )
    RUN_FILE = _Row(
        "the configuration file of a run",
        "`holdfast {verb} {path}` starts or continues its run, and `holdfast config show {path}` prints it, with the "
        "run.dir and the run.name of that run.",
    )
    FOREIGN_CONFIG = _Row(
        "a configuration file of {title}",
        "`holdfast config import {path} --from {system} --to RUN.yaml` writes it as one of ours.",
    )
    FOREIGN_CHECKPOINT = _Row("a checkpoint of another system")
    """Never told from a path: `holdfast checkpoint check` has the list of systems."""


KEYS: Mapping[str, tuple[PathKind, ...]] = {
    "model.path": (PathKind.MODEL, PathKind.EXPORT),
    "model.tokenizer": (PathKind.MODEL, PathKind.EXPORT, PathKind.ADAPTER),
    "model.lora.path": (PathKind.ADAPTER,),
    "data.path": (PathKind.ROWS,),
}
"""Kinds of paths that a key takes; `model.path` stands for the keys of other models."""
MODEL_PATH = KEYS["model.path"]
_NAMED_BY_READERS = (PathKind.MODEL, PathKind.WEIGHTS)
"""Kinds that the readers of checkpoints refuse themselves, with the name of the system that wrote the files."""
_MOST_ENTRIES = 1000


def misplaced(path: str, taken: Sequence[PathKind], subject: str) -> str | None:
    """Return a refusal of a path whose kind is known and not taken, else None.

    Args:
        path: As it was written.
        taken: The kinds that are taken, the usual one first.
        subject: The command or the key that takes them: "`holdfast sft`", "model.path".
    """
    kind, facts = recognise(path)
    if kind is None or kind in taken or (PathKind.CHECKPOINT in taken and kind in _NAMED_BY_READERS):
        return None
    place = path.rstrip("/") or path
    facts = {"path": place, "parent": str(Path(place).parent), **facts}
    nouns = " or ".join(each.value.noun.format(title="another system") for each in taken[:2])
    row = kind.value
    return f"{place} is {row.noun.format_map(facts)}, and {subject} takes {nouns}. {row.use.format_map(facts)}"


def pointer_refusal(file: Path) -> str | None:
    """Return the refusal of a git-lfs pointer in the place of a file that is read; None for any other file."""
    if not is_lfs_pointer(file):
        return None
    return (
        f"{file} is a git-lfs pointer: git keeps a few bytes in the place of the contents, which `git lfs pull` in "
        "that directory fetches; `hf download` fetches them without git."
    )


def recognise(path: str) -> tuple[PathKind | None, dict[str, str]]:
    """Return the kind of a local path, if any fits, and the `verb` or the `system` and `title` of a configuration."""
    local_path = expanded(path)
    if "://" in path or "\0" in path:
        return None, {}
    with contextlib.suppress(OSError):
        if local_path.is_dir():
            names = [entry.name for entry in islice(local_path.iterdir(), _MOST_ENTRIES)]
            return next((kind for kind in PathKind if _is_marked(local_path, names, kind.value.markers)), None), {}
        if local_path.is_file():
            if local_path.suffix in {".yaml", ".yml"}:
                return _configuration(local_path)
            patterns = ((pattern, kind) for kind in PathKind for pattern in kind.value.names)
            return next((kind for pattern, kind in patterns if fnmatch(local_path.name, pattern)), None), {}
    return None, {}


def _is_marked(directory: Path, names: Sequence[str], markers: Sequence[str]) -> bool:
    return any(all(_holds(directory, names, pattern) for pattern in marker.split()) for marker in markers)


def _holds(directory: Path, names: Sequence[str], pattern: str) -> bool:
    first, _, below = pattern.partition("/")
    return any(fnmatch(name, first) and (not below or (directory / name / below).is_file()) for name in names)


def _configuration(file: Path) -> tuple[PathKind | None, dict[str, str]]:
    """Tell a run's configuration from another system's by whose keys it has more of."""
    from holdfast.config.base import leaves
    from holdfast.config.verbs.roots import ROOTS, verb_of
    from holdfast.config.yaml12 import parse_file

    try:
        values = parse_file(file).values
    except ConfigError:
        return None, {}
    ours = [key for key in values if any(key in root.model_fields for root in ROOTS.values())]
    has_sections = any(isinstance(values.get(name), Mapping) for name in ("model", "data"))
    if has_sections and 2 * len(ours) > len(values):
        return PathKind.RUN_FILE, {"verb": verb_of(values)}
    foreign = registry.load(registry.FOREIGN_CONFIGURATION)({key for key, _ in leaves(values)}, more_than=len(ours))
    return (PathKind.FOREIGN_CONFIG, foreign) if foreign else (None, {})
