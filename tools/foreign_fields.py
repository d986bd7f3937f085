"""Writes the fields of other systems' configuration classes, which the table of their keys is tested against.

    python tools/foreign_fields.py TRL_WHEEL_FOLDER EASYR1_FOLDER > tests/config/other_systems/fields.json

The first folder is an unpacked wheel (`pip download --no-deps trl`, `unzip`), the second a checkout of EasyR1. Both are
read as text and nothing of them is run; transformers is the installed one.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

TRL = {
    "trl/trainer/base_config.py": ["_BaseConfig"],
    "trl/trainer/sft_config.py": ["SFTConfig"],
    "trl/trainer/dpo_config.py": ["DPOConfig"],
    "trl/trainer/grpo_config.py": ["GRPOConfig"],
    "trl/trainer/model_config.py": ["ModelConfig"],
    "trl/scripts/utils.py": ["ScriptArguments", "DatasetMixtureConfig"],
    "trl/scripts/grpo.py": ["GRPOScriptArguments"],
}
EASYR1 = [
    "verl/trainer/config.py",
    "verl/workers/actor/config.py",
    "verl/workers/critic/config.py",
    "verl/workers/reward/config.py",
    "verl/workers/rollout/config.py",
    "verl/workers/config.py",
]
Fields = dict[str, tuple[str, Any]]
"""Name of a field to its annotation and its default."""


def classes(path: Path) -> Iterator[tuple[str, Fields]]:
    """Yield the name and the fields of every class of a file, without those that nobody can set."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            assignments = (each for each in node.body if isinstance(each, ast.AnnAssign))
            yield node.name, {str(ast.unparse(each.target)): described(each) for each in assignments if settable(each)}


def settable(node: ast.AnnAssign) -> bool:
    """Return whether a field is an argument of its class."""
    call = node.value
    return not (isinstance(call, ast.Call) and any(each.arg == "init" for each in call.keywords))


def described(node: ast.AnnAssign) -> tuple[str, Any]:
    """Return the annotation and, where it is a plain value, the default."""
    value = node.value
    if isinstance(value, ast.Call):
        value = next((each.value for each in value.keywords if each.arg == "default"), None)
    try:
        default = None if value is None else ast.literal_eval(value)
    except ValueError:
        default = ast.unparse(value) if value is not None else None
    return ast.unparse(node.annotation), default


def leaves(name: str, sections: dict[str, Fields], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a tree of classes and their defaults."""
    for key, (annotation, default) in sections[name].items():
        if annotation in sections:
            yield from leaves(annotation, sections, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", default


def main(trl: Path, easyr1: Path) -> None:
    import dataclasses

    from transformers import TrainingArguments

    own = {field.name: _plain(field.default) for field in dataclasses.fields(TrainingArguments)}
    read: dict[str, Any] = {"transformers": {"TrainingArguments": own}, "trl": {}}
    for file, names in TRL.items():
        for name, fields in classes(trl / file):
            if name in names:
                read["trl"][name] = {key: default for key, (_, default) in fields.items()}
    files = [easyr1 / file for file in EASYR1 if (easyr1 / file).exists()]
    read["easyr1"] = {"PPOConfig": dict(leaves("PPOConfig", dict(each for file in files for each in classes(file))))}
    wheel = next(trl.glob("trl-*.dist-info")).name
    read["versions"] = {
        "transformers": version("transformers"),
        "trl": wheel.removeprefix("trl-").removesuffix(".dist-info"),
        "easyr1": "0.3.3.dev0",
    }
    read["recipe"] = "tools/foreign_fields.py"
    print(json.dumps(read, indent=1))


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
