"""Name what a directory is when it is not a checkpoint of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from holdfast.checkpoint.place.storage import Storage

System = tuple[Callable[[set[str], set[str]], bool], str]
"""Whether names in a directory, and those one level below, are a system's; and what to say then."""


def describe_foreign(storage: Storage, name: str) -> str:
    """Return a sentence that says what is there and what can be done with it."""
    names = set(storage.names(name))
    if not names:
        return _without_names(storage, name)
    inner = {entry for folder in names for entry in storage.names(f"{name}/{folder}" if name else folder)}
    entries = ", ".join(sorted(names)[:6])
    return _first([*_SYSTEMS, *_OTHERS], names, inner) or f"it holds {entries}."


def foreign_checkpoints(storage: Storage) -> str | None:
    """Return a sentence about checkpoints of another system that lie in a place; None where there are none."""
    below = {name: _entries(storage, name) for name in storage.names()}
    sentence = _first(_SYSTEMS, set(below), {name for names in below.values() for name in names})
    return sentence or next(
        (inner_sentence for names in below.values() if (inner_sentence := _first(_SYSTEMS, names, set()))), None
    )


def _entries(storage: Storage, name: str) -> set[str]:
    """Return what is in a directory; nothing where this user may not look, as in the lost+found of a disk."""
    try:
        return set(storage.names(name))
    except PermissionError:
        return set()


def _first(systems: Sequence[System], names: set[str], inner: set[str]) -> str | None:
    return next((sentence for test, sentence in systems if test(names, inner)), None)


def _without_names(storage: Storage, name: str) -> str:
    if not storage.exists(name):
        return "there is nothing at this path."
    sentences = (sentence for ending, sentence in _FILES.items() if (name or storage.root).endswith(ending))
    return next(sentences, "it is a file, or a directory that holds nothing.")


def _any(names: set[str], pattern: str) -> bool:
    return any(re.search(pattern, name) for name in names)


_FILES = {
    ".ckpt": (
        "it looks like a checkpoint of Lightning in one file. Load its state_dict into the model with torch.load, "
        "write that with save_pretrained, and set model.path to the result."
    ),
    ".safetensors": "it is one file of weights. Start from it by naming its directory in model.path.",
}
"""By ending: files that are somebody else's checkpoint."""

_SYSTEMS: list[System] = [
    (
        lambda names, inner: _any(names | inner, r"world_size_\d+_rank_\d+\.pt$"),
        "it looks like a checkpoint of verl or EasyR1 (one pickle per rank). `holdfast checkpoint check` looks at it, "
        "`holdfast checkpoint import` goes on from it.",
    ),
    (
        lambda names, _: (
            "latest_checkpointed_iteration.txt" in names
            or "checkpoint_tracker.json" in names
            or _any(names, r"^global_step_\d+$")
        ),
        "it looks like a run of verl or EasyR1 with its checkpoints. `holdfast checkpoint import` goes on from one of "
        "them, such as global_step_10/actor.",
    ),
    (
        lambda names, _: "meta.pt" in names and ".metadata" in names,
        "it looks like a sharded checkpoint of Lightning. `holdfast checkpoint import` goes on from it.",
    ),
    (
        lambda names, _: _any(names, r"\.ckpt$"),
        "it holds checkpoints of Lightning in single files. Load the state_dict of one into the model with torch.load, "
        "write that with save_pretrained, and set model.path to the result.",
    ),
    (
        lambda names, _: _any(names, r"^(pytorch_model_fsdp|optimizer)_\d+$") or "random_states_0.pkl" in names,
        "it looks like a checkpoint of accelerate or transformers' Trainer. `holdfast checkpoint import` goes on "
        "from it.",
    ),
    (
        lambda names, _: _any(names, r"^checkpoint-\d+$"),
        "it looks like an output directory of transformers' Trainer. Start from one of its checkpoints, such as "
        "checkpoint-500, with model.path.",
    ),
    (
        lambda names, inner: (
            (".metadata" in names and _any(names, r"\.distcp$"))
            or (_any(names, r"^step-\d+$") and ".metadata" in inner)
        ),
        "it is a plain DCP directory (torchtitan writes such). `holdfast checkpoint import` goes on from it.",
    ),
    (
        lambda names, inner: "checkpoint" in names and _any(inner, r"^step-\d{1,7}$"),
        "it looks like an output directory of torchtitan. Its checkpoints, such as checkpoint/step-10, are plain DCP "
        "directories; torch's dcp.load reads them.",
    ),
]
"""Checkpoints of other systems, and directories of them."""

_OTHERS: list[System] = [
    (
        lambda names, _: "config.json" in names and _any(names, r"\.safetensors"),
        "it is a Hugging Face model directory. Start from it with model.path; only a checkpoint can be resumed.",
    ),
    (
        lambda names, _: _any(names, r"^step-\d{8,}$") or "checkpoints" in names,
        "it is a run, or its folder of checkpoints. Name one checkpoint, such as checkpoints/step-00000100.",
    ),
]
