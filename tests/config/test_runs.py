"""How many updates a run makes, and what the configuration costs at start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping, load_config
from holdfast.config.sections.metrics import HealthConfig
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.verbs.training import SFTConfig, TrainingConfig, planned_steps
from holdfast.errors import ConfigError

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


def test_thresholds_of_alarms_in_earlier_exports_are_passed_over_and_unknown_in_a_users_file(tmp_path: Path) -> None:
    """They stand in the holdfast.yaml of every export of an earlier version."""
    earlier = {
        "enabled": False, "repeat_steps": 50, "lasting_steps": 5, "flat_reward_steps": 20, "flat_groups": 0.8,
        "truncated": 0.3, "lowest_entropy": 0.01, "reward_faults": 0.01, "kl_jump": 10.0, "gradient_spike": 10.0,
    }  # fmt: skip

    exported, own = tmp_path / "holdfast.yaml", tmp_path / "mine.yaml"
    for file in (exported, own):
        named = {"run": {"name": "a"}, "steps": 1, "metrics": {"health": earlier}}
        file.write_text(json.dumps(LEAST | named), encoding="utf-8")

    config = load_config(exported, ["run.name=a"], SFTConfig).config

    assert config.metrics.health == HealthConfig(enabled=False)
    with pytest.raises(ConfigError, match=r"metrics\.health\.kl_jump: unknown key; this section has enabled"):
        load_config(own, [], SFTConfig)
