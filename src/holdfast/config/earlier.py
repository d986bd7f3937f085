"""Forms of a configuration that earlier versions wrote, read as today's, since runs and exports on disk keep them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_CRITIC_DEFAULTS: Mapping[str, Any] = {
    "eps": 1e-8, "no_decay": [r"bias$", r"norm", r"\bln_"], "ema": None, "max_nonfinite_steps": 5, "momentum": 0.0,
    "dampening": 0.0, "nesterov": False, "compile": False,
}  # fmt: skip
"""Keys of `critic.optim` that are gone, with the value that they have for good."""


def todays_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with earlier forms replaced; sections that change are copied."""
    tree = dict(values)
    _replace(tree, "checkpoint.rehearsal", lambda section: section.get("enabled", True))
    _replace(tree, "metrics.health", lambda section: section.get("enabled", True))
    _replace(tree, "profile", lambda section: section.get("steps"))
    for event in ("timeout", "error", "nan", "none"):
        _replace(tree, f"rewards.on_{event}", lambda section: section.get("value", section.get("kind")))
    _replace(tree, "parallel.recompute", lambda section: _without(section, {"use_reentrant": False}))
    _replace(tree, "rollout", lambda section: _without(section, {"replay_routing": False}))
    _replace(tree, "rollout.engine", lambda section: _without(section, {"transport": "files"}))
    _replace(tree, "critic.optim", lambda section: _without(section, _CRITIC_DEFAULTS))
    return tree


def _replace(tree: dict[str, Any], dotted: str, change: Callable[[Mapping[str, Any]], Any]) -> None:
    """Change the section at a key, if a mapping stands there."""
    *above, last = dotted.split(".")
    for key in above:
        if not isinstance(tree.get(key), dict):
            return
        tree[key] = tree = dict(tree[key])
    if isinstance(tree.get(last), Mapping):
        tree[last] = change(tree[last])


def _without(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section without the keys that have these values."""
    return {key: value for key, value in section.items() if key not in defaults or value != defaults[key]}
