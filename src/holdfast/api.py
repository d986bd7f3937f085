"""Holdfast from Python: the YAML's tree, with live objects where the YAML names files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.config.load import from_mapping, load
from holdfast.config.runs import SFTConfig
from holdfast.errors import ConfigError
from holdfast.launch.environment import under_torchrun
from holdfast.objectives.base import Objective
from holdfast.parallel.mesh import joined
from holdfast.recipes.sft import sft as run_sft
from holdfast.training.build import Live
from holdfast.training.fit import Outcome

_GIVEN = "(given in Python)"


def sft(
    config: SFTConfig | Mapping[str, Any] | str | Path,
    *,
    rows: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    objective: Objective | None = None,
    observers: tuple[Callable[..., object], ...] = (),
) -> Outcome:
    """Fine-tune in this process; under torchrun, as one of its ranks.

    Args:
        config: The tree: a built one, nested mappings, or the path of a YAML file.
        rows: Training rows, instead of `data.path`: a list of dictionaries, a `datasets.Dataset`, or any iterable that
            can be walked again.
        model: A transformers model, instead of `model.path`; its weights are copied, the object itself is not touched.
        tokenizer: A transformers tokenizer, instead of `model.tokenizer`.
        objective: A loss, instead of `objective`.
        observers: Functions that see every step.

    Raises:
        UserError: What was asked for cannot work; nothing was written.
        RunStopped: The run stopped before its end.
    """
    base = Path.cwd()
    if isinstance(config, str | Path):
        loaded = load(Path(config), [], SFTConfig)
        config, base = loaded.config, loaded.base
    elif isinstance(config, Mapping):
        config = from_mapping(_with_live_sections(config, rows, model, tokenizer), SFTConfig)
    wanted = config.launch.ranks
    if not under_torchrun(os.environ) and wanted not in {"auto", 1}:
        raise ConfigError(
            f"launch.ranks={wanted}, but a Python call is one process. Start the script with `torchrun "
            f"--nproc-per-node {wanted} script.py`, or use `holdfast sft RUN.yaml`."
        )
    live = Live(rows, model, tokenizer, objective, observers)
    with joined(config.launch) as world:
        return run_sft(config, base, world, live)


def _with_live_sections(config: Mapping[str, Any], rows: Any, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Name what is given in Python, so that the tree is whole without it."""
    values = dict(config)
    if rows is not None:
        values["data"] = {"path": _GIVEN, **(values.get("data") or {})}
    if model is not None:
        section = {"path": _GIVEN, **(values.get("model") or {})}
        if tokenizer is None and "tokenizer" not in section:
            raise ConfigError("A model given in Python needs its tokenizer: pass tokenizer=, or set model.tokenizer.")
        values["model"] = section
    return values
