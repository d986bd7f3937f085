"""How many updates a run makes, and what the configuration costs at start."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.verbs.training import SFTConfig, TrainingConfig, planned_steps

LEAST: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}


@pytest.mark.parametrize(
    ("length", "steps_per_epoch", "planned"),
    [
        ({"steps": 7}, 10, 7),
        ({"steps": 7}, None, 7),
        ({"epochs": 2}, 10, 20),
        ({"epochs": 0.25}, 10, 3),
        ({"epochs": 1.1}, 10, 11),
        ({"epochs": 0.07}, 100, 7),
        ({"epochs": 0.001}, 10, 1),
        ({"epochs": 2, "steps": 7}, 10, 7),
        ({"epochs": 2, "steps": 70}, 10, 20),
        ({"epochs": 2}, None, None),
        ({"max_minutes": 5, "optim": {"schedule": "constant"}}, 10, None),
        ({"dry_run": True}, 10, 2),
        ({"steps": 100, "dry_run": True}, 10, 2),
    ],
)
def test_a_run_ends_with_whatever_comes_first(
    length: dict[str, Any], steps_per_epoch: int | None, planned: int | None
) -> None:
    config = from_mapping(LEAST | length, SFTConfig)

    assert planned_steps(config, steps_per_epoch) == planned


def test_checking_a_configuration_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, pkgutil, importlib, holdfast.config as config, holdfast.types, holdfast.errors\n"
        "for module in pkgutil.iter_modules(config.__path__, 'holdfast.config.'):\n"
        "    importlib.import_module(module.name)\n"
        "import holdfast.cli.main, holdfast.cli.commands.train, holdfast.cli.commands.config, holdfast.launch.local\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}\n"
        "             & {'torch', 'transformers', 'datasets', 'numpy', 'safetensors'}))\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("root", ROOTS.values(), ids=list(ROOTS))
def test_every_verb_says_whether_what_it_trains_writes_texts(root: type[TrainingConfig]) -> None:
    writes = "rollout" in root.model_fields

    assert root.samples is writes
