"""What a resume must find unchanged besides files that a configuration names: modules they import, reward models."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from holdfast.checkpoint.place.hashing import hash_bytes, hash_file
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.reward import ModelRewardConfig
from holdfast.errors import ModelError
from holdfast.files import read_bytes
from holdfast.models.source.origin import files_mark, locate
from holdfast.training.setting import RunFile

IMPORTS, REWARD_MODEL = " imports ", "reward model "
_TEXTS = {".json", ".jinja", ".model", ".txt", ".bin"}
"""What a model directory holds beside safetensors: its configuration, its tokenizer, weights of the old format."""


def is_new(what: str) -> bool:
    """Say whether earlier versions did not look at this: their checkpoints say nothing of it."""
    return IMPORTS in what or what.startswith(REWARD_MODEL)


def helper_hashes(named: str, file: Path) -> dict[str, str]:
    """Return the hashes of the modules in a file's folder that it imports, and that these import.

    Read from the import statements, wherever they stand. What is imported by other means is not seen.
    """
    root = file.resolve().parent
    modules: dict[Path, None] = {file.resolve(): None}
    waiting = [*modules]
    while waiting:
        new = [module for module in _imported(waiting.pop(), root) if module not in modules]
        modules |= dict.fromkeys(new)
        waiting += new
    helpers = [*modules][1:]
    return {f"{named}{IMPORTS}{helper.relative_to(root)}": hash_file(helper) for helper in helpers}


def _imported(file: Path, root: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(read_bytes(file))
    except (SyntaxError, ValueError):
        return  # whoever imports it says so
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield from _modules(root, name.name)
            case ast.ImportFrom(module=module, names=names, level=level):
                place = file.parents[level - 1] if 0 < level <= len(file.parents) else root
                for name in names:
                    dotted = f"{module}.{name.name}" if module else name.name
                    yield from (each for each in _modules(place, dotted) if each.is_relative_to(root))


def _modules(place: Path, dotted: str) -> Iterator[Path]:
    """Yield the files behind a dotted name: its packages, and its module."""
    for part in dotted.split("."):
        yield from (each for each in (place / f"{part}.py", place / part / "__init__.py") if each.is_file())
        place /= part


def reward_models(setting: RunFile) -> dict[str, Path]:
    """Return the directories of the models that score, by the names they have in the configuration."""
    directories = {}
    for section in getattr(setting.config, "reward", ()):
        if isinstance(section, ModelRewardConfig):
            try:
                directories[section.path] = locate(
                    section.path, ModelConfig(path=section.path), setting.base, weights=True
                )
            except ModelError:
                continue  # a run that scores has refused it; a replay does without
    return directories


def reward_model_hashes(setting: RunFile) -> dict[str, str]:
    """Return what tells the models that score from others: their weights, and the files that say how they read text."""
    hashes = {}
    for name, directory in reward_models(setting).items():
        texts = sorted(file for file in directory.iterdir() if file.suffix in _TEXTS and file.is_file())
        lines = "\n".join(f"{file.name} {hash_file(file)}" for file in texts)
        hashes[f"{REWARD_MODEL}{name} weights"] = files_mark(directory)
        hashes[f"{REWARD_MODEL}{name} configuration and tokenizer"] = hash_bytes(lines.encode())
    return hashes
