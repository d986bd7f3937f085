"""What a path leads to, and which commands and keys take it.

`recognise` looks at names and small files; `_USES` says for each kind of path what takes it. A path of a kind that is
not in the table is `UNKNOWN`, and whoever was asked to read it says what is wrong with it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from holdfast.errors import ConfigError, UserError
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
    CHECKPOINT_FILE = "a file of a checkpoint"
    ROWS = "a file of rows"
    ROWS_DIRECTORY = "a directory of rows"
    LFS_POINTER = "a git-lfs pointer"
    SCRIPT = "a script"
    UNKNOWN = "something else"


K = PathKind
MODEL_PATH = (K.MODEL, K.EXPORT, K.FOREIGN_CHECKPOINT)
KEYS: Mapping[str, tuple[PathKind, ...]] = {
    "model.path": MODEL_PATH,
    "model.tokenizer": (*MODEL_PATH, K.ADAPTER),
    "model.lora.path": (K.ADAPTER,),
    "data.path": (K.ROWS, K.ROWS_DIRECTORY, K.RECORD),
}
"""What keys of a run take; other keys take what one of these takes."""

_TRAINED_MODEL = (
    "Name its model: {model}.",
    "`holdfast checkpoint export {path} -o DIR` writes its newest checkpoint as a model directory; "
    "checkpoint.init_from={newest} begins with its weights.",
    "It has no checkpoint yet: `holdfast {verb} {path}/config.resolved.yaml` continues it.",
)
_LOOK_AT_RUN = "`holdfast report {path}` shows it, `holdfast checkpoint ls {path}` lists its checkpoints."
_LOOK_AT_CHECKPOINT = "`holdfast checkpoint show {path}` describes it, `holdfast checkpoint verify {path}` checks it."
_OF_RUN = "`holdfast watch {run}` and `holdfast report {run}` show the run."
_TRY_MODEL = "`holdfast model check {path}` looks at it, and a run begins with it by model.path={path}."
_ROWS = "A run reads it by data.path={path}; `holdfast init --model MODEL --data {path}` writes the file of such a run."

Uses = Mapping[PathKind | None, str | tuple[str, ...]]
_USES: Mapping[PathKind, Uses] = {
    K.RUN: {
        K.RUN_FILE: (
            "`holdfast {verb} {path}/config.resolved.yaml` continues it.",
            "Its configuration is {path}/config.resolved.yaml.",
        ),
        K.MODEL: _TRAINED_MODEL,
        K.EXPORT: _TRAINED_MODEL,
        K.ADAPTER: (
            "Name its adapters: {adapter}.",
            "`holdfast checkpoint export {path} --adapter -o DIR` writes them.",
        ),
        None: _LOOK_AT_RUN,
    },
    K.RUNS: {None: "`holdfast runs ls {path}` lists them."},
    K.CHECKPOINT: {
        K.RUN_FILE: ("`holdfast {verb} {run}/config.resolved.yaml` continues its run.", _LOOK_AT_CHECKPOINT),
        K.RUN: ("Its run is {run}: `holdfast report {run}`.", _LOOK_AT_CHECKPOINT),
        K.MODEL: "`holdfast checkpoint export {path} -o DIR` writes it as a model directory; "
        "checkpoint.init_from={path} begins a run with its weights.",
        K.EXPORT: "`holdfast checkpoint export {path} -o DIR` writes it as a model directory.",
        K.ADAPTER: "`holdfast checkpoint export {path} --adapter -o DIR` writes its adapters.",
        None: _LOOK_AT_CHECKPOINT,
    },
    K.CHECKPOINTS: {
        K.RUN_FILE: "`holdfast checkpoint ls {path}` lists them.",
        K.MODEL: "`holdfast checkpoint export {path} -o DIR` writes the newest as a model directory.",
        K.EXPORT: "`holdfast checkpoint export {path} -o DIR` writes the newest as a model directory.",
        None: "`holdfast checkpoint ls {path}` lists them.",
    },
    K.EXPORT: {
        K.RUN: (
            "Its run is {run}: `holdfast report {run}`.",
            "`holdfast eval {path}` and `holdfast generate {path}` use it.",
        ),
        K.CHECKPOINT: "It holds no optimizer and cannot be resumed. `holdfast eval {path}` and `holdfast generate "
        "{path}` use it.",
        None: "`holdfast eval {path}` and `holdfast generate {path}` use it; model.path={path} begins a run with it.",
    },
    K.ADAPTER: {
        K.EXPORT: (
            "Name the merged model: {merged}.",
            "model.path=MODEL model.lora.path={path} begins a run with them and the model below them.",
        ),
        K.MODEL: (
            "Name the merged model: {merged}.",
            "Name the model below them, and them by their own key: model.path={base} model.lora.path={path}.",
            "Name the model below them by model.path, and them by model.lora.path={path}.",
        ),
        None: "model.lora.path={path} begins a run with them, and model.path names the model below them; "
        "`holdfast push {path} OWNER/NAME` publishes them.",
    },
    K.MODEL: {
        K.RUN_FILE: "`holdfast init --model {path} --data ROWS` writes the file of a run that begins with it.",
        K.EXPORT: "Holdfast did not write it: `holdfast model check {path}` looks at it, and the hub's own "
        "`hf upload` publishes it.",
        None: _TRY_MODEL,
    },
    K.FOREIGN_CHECKPOINT: {
        None: "`holdfast checkpoint check {path}` says what is in it; `holdfast checkpoint import {path} --export DIR` "
        "makes it a model directory, --as RUN.yaml continues it.",
    },
    K.WEIGHTS: {
        K.MODEL: "Name the directory that it is in: {parent}.",
        None: "`holdfast checkpoint check {path}` looks at it; a run begins with the directory that it is in: "
        "model.path={parent}.",
    },
    K.MODEL_CONFIG: {
        K.MODEL: "Name its directory, {parent}; random weights of this shape are model.config.",
        None: "`holdfast model check {path}` looks at it; a run begins with its directory: model.path={parent}.",
    },
    K.RUN_FILE: {
        K.RUN: (
            "Its run is {run}: `holdfast report {run}`.",
            "`holdfast {verb} {path}` starts it; its run will be {expected}.",
        ),
        K.CHECKPOINT: (
            "Its run is {run}: `holdfast checkpoint ls {run}`.",
            "`holdfast {verb} {path}` starts it; its run will be {expected}.",
        ),
        K.EXPORT: (
            "Its run is {run}, whose exports are models: `holdfast runs ls {run}`.",
            "`holdfast {verb} {path}` starts it; its model will be {expected}/exports/final.",
        ),
        K.FOREIGN_CONFIG: "Nothing has to be imported: `holdfast {verb} {path}` starts it.",
        None: "`holdfast {verb} {path}` starts it, `holdfast config show {path}` prints it.",
    },
    K.FOREIGN_CONFIG: {
        None: "`holdfast config import {path} --from {system} --to RUN.yaml` writes it as one of ours.",
    },
    K.RECORD: {None: _OF_RUN},
    K.CHECKPOINT_FILE: {None: "`holdfast checkpoint show {checkpoint}` describes the checkpoint."},
    K.ROWS: {None: _ROWS},
    K.ROWS_DIRECTORY: {None: _ROWS},
    K.LFS_POINTER: {
        None: "git keeps {size} in the place of the contents, which `git lfs pull` in that directory fetches; "
        "`hf download` fetches them without git.",
    },
    K.SCRIPT: {
        None: "Holdfast runs no scripts: a run is a YAML file, which `holdfast init --model MODEL --data ROWS` writes. "
        "docs/python.md describes the use from Python.",
    },
}
"""Kind of a path -> the kind that was asked for, or None for all others -> what takes it.

Of several sentences the first counts whose every field is known of the path.
"""


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

    def use(self, wanted: PathKind) -> str:
        """Return the sentence that names what takes the path, for someone who was to name another kind."""
        uses = _USES[self.kind]
        templates = uses.get(wanted, uses[None])
        known = {"path": self.path, "parent": str(Path(self.path).parent), **self.facts}
        several = (templates,) if isinstance(templates, str) else templates
        for template in several:
            if all(name is None or name in known for _, name, _, _ in Formatter().parse(template)):
                return template.format_map(known)
        raise AssertionError(self)


def check_path(path: str, taken: Collection[PathKind], subject: str) -> None:
    """Refuse a path of another kind than is taken; one that is unknown or absent is left to its reader.

    Args:
        path: As it was written.
        taken: What is taken, the usual kind first.
        subject: The command or the key: "`holdfast sft`", "model.path".

    Raises:
        UserError: The path is of another kind, whose own command the message names.
    """
    refusal = misplaced(path, taken, subject)
    if refusal is not None:
        raise UserError(refusal)


def misplaced(path: str, taken: Collection[PathKind], subject: str) -> str | None:
    """Return what `check_path` raises, None where it does not."""
    at = recognise(path)
    if at.kind is K.UNKNOWN or at.kind in taken:
        return None
    wanted = list(taken)
    nouns = " or ".join(wanted[:2])
    return f"{path} is {at.noun}, and {subject} takes {nouns}. {at.use(wanted[0])}"


def recognise(path: str | Path) -> Recognised:
    """Return the kind of a local path; `UNKNOWN` where nothing is there, or nobody can look."""
    text = str(path)
    place = expanded(text)
    kind, facts = K.UNKNOWN, {}
    with contextlib.suppress(OSError):
        if "://" not in text and "\0" not in text:
            if place.is_dir():
                kind, facts = _directory(place)
            elif place.is_file():
                kind, facts = _file(place)
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

Kind = tuple[PathKind, dict[str, str]]


def _directory(place: Path) -> Kind:
    names = set()
    for entry, _ in zip(place.iterdir(), range(_MOST_ENTRIES), strict=False):
        names.add(entry.name)
    if _is_run(place, names):
        return K.RUN, _facts_of_run(place)
    if {"manifest.json", "dcp"} <= names:
        return K.CHECKPOINT, _run_above(place, 2)
    if any(_STEP.fullmatch(name) for name in names):
        return K.CHECKPOINTS, _run_above(place, 1)
    return _model_directory(place, names) or _other_directory(place, names)


def _model_directory(place: Path, names: set[str]) -> Kind | None:
    if {"config.json", "adapter_config.json"} & names:
        pointer = next((name for name in sorted(names) if _is_pointer(place / name)), None)
        if pointer is not None:
            return K.LFS_POINTER, _pointer_facts(place / pointer)
    if "adapter_config.json" in names and "config.json" not in names:
        return K.ADAPTER, _facts_of_adapter(place)
    if "config.json" in names and _is_model_config(place / "config.json"):
        ours = names & {"holdfast.yaml", "holdfast_export.json"}
        return (K.EXPORT, _run_above(place, 2)) if ours else (K.MODEL, {})
    return None


def _other_directory(place: Path, names: set[str]) -> Kind:
    if any(_OF_OTHERS.fullmatch(name) for name in names):
        return K.FOREIGN_CHECKPOINT, {}
    below = [place / name for name in sorted(names) if not name.startswith(".")]
    if any((entry / "run.json").is_file() and _is_run(entry, {"run.json"}) for entry in below):
        return K.RUNS, {}
    if any(entry.name.endswith(_ROW_FILES) for entry in below):
        return K.ROWS_DIRECTORY, {}
    return K.UNKNOWN, {}


def _file(place: Path) -> Kind:
    if is_lfs_pointer(place):
        return K.LFS_POINTER, _pointer_facts(place)
    for names, kind, above in ((_OF_A_RUN, K.RECORD, K.RUN), (_OF_A_CHECKPOINT, K.CHECKPOINT_FILE, K.CHECKPOINT)):
        if place.name in names and recognise(place.parent).kind is above:
            return kind, {"run": str(place.parent), "checkpoint": str(place.parent)}
    if place.name.endswith(_WEIGHTS):
        return K.WEIGHTS, {}
    if place.name.endswith(_SCRIPTS):
        return K.SCRIPT, {}
    if place.name == "config.json" and _is_model_config(place):
        return K.MODEL_CONFIG, {}
    if place.name.endswith(_ROW_FILES) or place.name.endswith((".jsonl.gz", ".jsonl.zst")):
        return K.ROWS, {}
    return _configuration(place) if place.name.endswith(_CONFIGURATIONS) else (K.UNKNOWN, {})


def _configuration(place: Path) -> Kind:
    """Tell our configuration files from those of other systems by whose keys they have more of."""
    from holdfast.config.verbs.roots import verb_of
    from holdfast.config.yaml12 import parse_file
    from holdfast.features.rescue.systems.table import READABLE, load_key_table

    try:
        values = parse_file(place).values
    except ConfigError:
        return K.UNKNOWN, {}
    keys = set(_dotted(values))
    ours = len(keys & _own_keys())
    if 2 * ours >= len(keys) > 0:
        return K.RUN_FILE, {"verb": verb_of(values), **_run_of_file(place, values)}
    tables = [load_key_table(name) for name in READABLE]
    best = max(tables, key=lambda table: (len(keys & table.entries.keys()), len(keys & table.own)))
    if len(keys & best.entries.keys()) <= ours:
        return K.UNKNOWN, {}
    return K.FOREIGN_CONFIG, {"system": best.name, "title": best.title}


def _run_of_file(place: Path, values: Mapping[str, Any]) -> dict[str, str]:
    section = values.get("run")
    section = section if isinstance(section, Mapping) else {}
    directory = Path(str(section.get("dir", "runs"))) / str(section.get("name", place.stem))
    there = {"run": str(directory)} if _is_run(directory, {"run.json"}) else {}
    return {"expected": str(directory), **there}


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


def _is_pointer(place: Path) -> bool:
    return place.name.endswith((*_WEIGHTS, ".json", ".model")) and is_lfs_pointer(place)


def _pointer_facts(place: Path) -> dict[str, str]:
    return {"file": str(place), "size": f"{place.stat().st_size} bytes"}


def _is_run(place: Path, names: set[str]) -> bool:
    return "run.json" in names and "run_id" in _mapping(place / "run.json")


def _facts_of_run(place: Path) -> dict[str, str]:
    verb = _mapping(place / "run.json").get("verb")
    facts = {"verb": verb} if isinstance(verb, str) else {}
    named = {"model": place / "exports" / "final", "adapter": place / "exports" / "final-adapter"}
    facts |= {name: str(path) for name, path in named.items() if path.is_dir()}
    steps = sorted(path for path in (place / "checkpoints").glob("step-*") if _STEP.fullmatch(path.name))
    return facts | ({"newest": str(steps[-1])} if steps else {})


def _run_above(place: Path, levels: int) -> dict[str, str]:
    """Return the run that a checkpoint or an export lies in, if it still does."""
    directory = place
    for _ in range(levels):
        directory = directory.parent if directory.name else directory.absolute().parent
    if not _is_run(directory, {"run.json"}):
        return {}
    verb = _mapping(directory / "run.json").get("verb")
    return {"run": str(directory)} | ({"verb": verb} if isinstance(verb, str) else {})


def _facts_of_adapter(place: Path) -> dict[str, str]:
    base = _mapping(place / "adapter_config.json").get("base_model_name_or_path")
    facts = {"base": base} if isinstance(base, str) and base else {}
    merged = place.with_name(place.name.removesuffix("-adapter"))
    return facts | ({"merged": str(merged)} if merged != place and merged.is_dir() else {})


def _is_model_config(place: Path) -> bool:
    return bool({"model_type", "architectures"} & _mapping(place).keys())


def _mapping(place: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one where there is none."""
    with contextlib.suppress(OSError, ValueError):
        values = read_json(place)
        return values if isinstance(values, dict) else {}
    return {}
