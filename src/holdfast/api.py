"""Holdfast from Python: the YAML's tree, with live objects where the YAML names files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.config.load import Draft, Loaded, check, read
from holdfast.config.runs import SFTConfig
from holdfast.config.yaml12 import Document
from holdfast.errors import ConfigError
from holdfast.launch.environment import under_torchrun
from holdfast.objectives.base import Objective
from holdfast.parallel.mesh import joined
from holdfast.recipes.sft import sft as run_sft
from holdfast.training.build import Live
from holdfast.training.fit import Outcome

GIVEN = "(given in Python)"
"""Stands in the recorded configuration where a live object was used."""


def sft(
    config: SFTConfig | Mapping[str, Any] | str | Path,
    *,
    rows: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    objective: Objective | None = None,
    observers: Sequence[Callable[..., object]] = (),
) -> Outcome:
    """Fine-tune in this process; under torchrun, as one of its ranks.

    Args:
        config: The tree: a built one, nested mappings, or the path of a YAML file.
        rows: Training rows, instead of those that `data` names: a list of dictionaries, a `datasets.Dataset`, or any
            iterable that can be walked again.
        model: A transformers model, instead of `model.path`; its weights are copied, the object itself is not touched.
        tokenizer: A transformers tokenizer, instead of `model.tokenizer`.
        objective: A loss, instead of `objective`.
        observers: Functions that see every step.

    Raises:
        UserError: What was asked for cannot work; nothing was written.
        RunStopped: The run stopped before its end.
    """
    live = Live(rows, model, tokenizer, objective, tuple(observers))
    tree = _checked(config, live)
    wanted = tree.config.launch.ranks
    if not under_torchrun() and wanted not in {"auto", 1}:
        raise ConfigError(
            f"launch.ranks={wanted}, but a Python call is one process. Start the script with `torchrun "
            f"--nproc-per-node {wanted} script.py`, or use `holdfast sft RUN.yaml`."
        )
    with joined(tree.config.launch) as world:
        return run_sft(tree.config, tree.base, world, live)


def _checked(config: SFTConfig | Mapping[str, Any] | str | Path, live: Live) -> Loaded[SFTConfig]:
    """Check the tree with live objects in the place of what it names."""
    if isinstance(config, str | Path):
        draft, base = read(Path(config), [], SFTConfig), Path(config).resolve().parent
    else:
        draft, base = Draft(Document("config", dict(config))), Path.cwd()
    values = draft.document.values
    if live.rows is not None:
        values["data"] = _without(values.get("data"), ("path", "synthetic", "sources")) | {"path": GIVEN}
    if live.model is not None:
        values["model"] = _live_model(values.get("model"), live)
    elif live.tokenizer is not None:
        values["model"] = _without(values.get("model"), ()) | {"tokenizer": GIVEN}
    return Loaded(check(draft, SFTConfig), base)


def _live_model(section: Any, live: Live) -> dict[str, Any]:
    """Name the live model; its tokenizer is the live one, else the one that the section would have used."""
    named = _without(section, ())
    tokenizer = GIVEN if live.tokenizer is not None else named.get("tokenizer") or named.get("path")
    if tokenizer is None:
        raise ConfigError("A model given in Python needs its tokenizer: pass tokenizer=, or set model.tokenizer.")
    return _without(section, ("config",)) | {"path": GIVEN, "tokenizer": tokenizer}


def _without(section: Any, keys: Sequence[str]) -> dict[str, Any]:
    """Return a section (mappings, a built one, or none at all) as a mapping without some of its keys."""
    return {key: value for key, value in dict(section or {}).items() if key not in keys}
