"""Which commands and keys take a path, by its kind: one table, which every command and key answers from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from string import Formatter

from holdfast.config.path_kinds import PathKind, Recognised, recognise
from holdfast.errors import UserError

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

_NAMED_BY_READERS = (K.FOREIGN_CHECKPOINT, K.WEIGHTS)
"""Kinds that readers of checkpoints refuse themselves, with the name of the system that wrote the files."""


def use(at: Recognised, expected: PathKind) -> str:
    """Return the sentence that names what takes the path, for someone who was to name another kind."""
    uses = _USES[at.kind]
    templates = uses.get(expected, uses[None])
    facts = {"path": at.path, "parent": str(Path(at.path).parent), **at.facts}
    several = (templates,) if isinstance(templates, str) else templates
    for template in several:
        if all(name is None or name in facts for _, name, _, _ in Formatter().parse(template)):
            return template.format_map(facts)
    raise AssertionError(at)


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
    if at.kind is K.UNKNOWN or at.kind in taken or (K.CHECKPOINT in taken and at.kind in _NAMED_BY_READERS):
        return None
    expected = list(taken)
    nouns = " or ".join(expected[:2])
    return f"{path} is {at.noun}, and {subject} takes {nouns}. {use(at, expected[0])}"
