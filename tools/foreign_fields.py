"""Writes the fields of other systems' configuration classes, which the table of their keys is tested against.

    python tools/foreign_fields.py FOLDER > tests/features/rescue/systems/fields.json

The folder has a wheel of each system, unpacked into a folder of its name (`pip download --no-deps trl`, `unzip`): trl,
verl, axolotl and llamafactory; easyr1 is a checkout. All are read as text and nothing of them is run;
transformers is the installed one.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from holdfast.config.base import leaves as config_leaves
from holdfast.config.yaml12 import parse_text

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
NAMED = {
    "axolotl": "axolotl/utils/schemas/*.py",
    "llamafactory": "llamafactory/hparams/*.py",
}
"""Systems of which every name of a field is kept, and where their classes are."""
VERL = "verl/trainer/config/_generated_ppo_trainer.yaml"
PASSED_OVER = re.compile(
    r"profiler|qat|_target_|transfer_queue|mtp|distillation|engine_kwargs|turbo|disaggregation|v1\."
)
"""Parts of verl's tree that no file of a user sets."""
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


def names(folder: Path) -> dict[str, list[str]]:
    """Return the names that systems without a complete table have, sorted."""
    lists: dict[str, set[str]] = {}
    for system, pattern in NAMED.items():
        read = (classes(path) for path in (folder / system).glob(pattern))
        lists[system] = {name for each in read for _, fields in each for name in fields}
    tree = parse_text((folder / "verl" / VERL).read_text("utf-8"), VERL).values
    lists["verl"] = {key for key, _ in config_leaves(tree) if not PASSED_OVER.search(key)}
    return {system: sorted(each) for system, each in lists.items()}


def main(folder: Path) -> None:
    """Print everything as JSON."""
    import dataclasses

    from transformers import TrainingArguments

    own = {field.name: _plain(field.default) for field in dataclasses.fields(TrainingArguments)}
    read: dict[str, Any] = {"transformers": {"TrainingArguments": own}, "trl": {}}
    for file, class_names in TRL.items():
        for name, fields in classes(folder / "trl" / file):
            if name in class_names:
                read["trl"][name] = {key: default for key, (_, default) in fields.items()}
    files = [folder / "easyr1" / file for file in EASYR1 if (folder / "easyr1" / file).exists()]
    read["easyr1"] = {"PPOConfig": dict(leaves("PPOConfig", dict(each for file in files for each in classes(file))))}
    wheels = (next(folder.glob(f"{name}/*.dist-info"), None) for name in ("trl", "verl", *NAMED))
    versions = dict(wheel.name.removesuffix(".dist-info").split("-") for wheel in wheels if wheel is not None)
    read["versions"] = {"transformers": version("transformers"), "easyr1": "0.3.3.dev0", **versions}
    read["recipe"] = "tools/foreign_fields.py"
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in (read | {"names": names(folder)}).items()]
    print("{\n" + ",\n".join(parts) + "\n}")


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
