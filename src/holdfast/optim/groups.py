"""Param groups: which parameters share a peak rate and a weight decay, decided by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.config.sections.optim import OptimConfig, ParameterGroupConfig
from holdfast.errors import ConfigError, ModelError

PEAK = "peak_lr"
"""Key of a param group that holds its peak learning rate, which the schedule's factor multiplies."""
STEM = "group"
"""Key of a param group that holds the name of the entry of `optim.groups` that made it."""
REST = "rest"
"""Value of `STEM` for parameters that no entry of `optim.groups` matches."""
DECAY, NO_DECAY = "decay", "no_decay"


@dataclass(frozen=True)
class GroupPlan:
    """A param group without its tensors."""

    stem: str
    """Name of the entry of `optim.groups` that made it, or `rest`."""
    decays: bool
    """Whether the group has weight decay, since no pattern of `optim.no_decay` matches its parameters."""
    names: tuple[str, ...]
    lr: float
    """Peak learning rate."""
    weight_decay: float

    @property
    def name(self) -> str:
        """Name of the param group: `decay` or `no_decay`, after the entry's name and a slash if it has one."""
        kind = DECAY if self.decays else NO_DECAY
        return kind if self.stem == REST else f"{self.stem}/{kind}"


def plan_groups(config: OptimConfig, parameters: Mapping[str, nn.Parameter]) -> list[GroupPlan]:
    """Return the groups of the trained parameters, in the order of `optim.groups`, the rest last.

    Args:
        config: The section `optim`. A parameter belongs to the first entry of `groups` that matches it.
        parameters: All parameters by canonical name; frozen ones are left out.

    Raises:
        ModelError: Nothing is trained.
        ConfigError: An entry matches no parameter, or sets a decay although all its parameters match `no_decay`.
    """
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not trained:
        raise ModelError("No parameter is trained: model.freeze covers all of them.")
    unassigned = trained
    plans: list[GroupPlan] = []
    for name, entry in config.groups.items():
        members = [parameter for parameter in unassigned if _matches(entry.match, parameter)]
        if not members:
            raise ConfigError(_nothing_matched(name, entry.match, parameters))
        unassigned = [parameter for parameter in unassigned if parameter not in set(members)]
        halves = _halves(config, entry, name, members)
        if entry.weight_decay and not halves[0].decays:
            raise ConfigError(
                f"optim.groups.{name}.weight_decay={entry.weight_decay:g} reaches nothing: optim.no_decay names all "
                f"of the group's parameters ({_some(members)}). Leave weight_decay out, or narrow optim.no_decay."
            )
        plans += halves
    return plans + _halves(config, None, REST, unassigned)


def _halves(
    config: OptimConfig, entry: ParameterGroupConfig | None, stem: str, names: Sequence[str]
) -> list[GroupPlan]:
    lr = config.lr if entry is None or entry.lr is None else entry.lr
    decay = config.weight_decay if entry is None or entry.weight_decay is None else entry.weight_decay
    plain = {name for name in names if any(_matches(pattern, name) for pattern in config.no_decay)}
    halves = [
        GroupPlan(stem, True, tuple(name for name in names if name not in plain), lr, decay),
        GroupPlan(stem, False, tuple(name for name in names if name in plain), lr, 0.0),
    ]
    return [half for half in halves if half.names]


def _matches(pattern: str, name: str) -> bool:
    return re.search(pattern, name) is not None


def _nothing_matched(name: str, pattern: str, parameters: Mapping[str, nn.Parameter]) -> str:
    """Explain why an entry of `optim.groups` got no parameter, and suggest names that its pattern may have meant."""
    key = f"optim.groups.{name}.match={pattern!r}"
    matching = [parameter for parameter in parameters if _matches(pattern, parameter)]
    trained = [parameter for parameter in matching if parameters[parameter].requires_grad]
    if not matching:
        return f"{key} matches no parameter. Names look like {', '.join(_near(pattern, parameters))}."
    if not trained:
        return (
            f"{key} matches frozen parameters only ({_some(matching)}). Remove the group, or train them (model.freeze)."
        )
    return (
        f"{key} matches only parameters that an earlier entry of optim.groups has ({_some(trained)}): of entries that "
        "match, the first one counts. Move it up, or remove it."
    )


def _near(pattern: str, parameters: Iterable[str]) -> list[str]:
    names = list(parameters)
    query = re.sub(r"[^A-Za-z0-9_.]+|\\", "", pattern).strip(".")
    by_part = {fragment: name for name in reversed(names) for fragment in {*name.split("."), name.rpartition(".")[0]}}
    close = difflib.get_close_matches(query, by_part, n=3, cutoff=0.6) or difflib.get_close_matches(query, names, n=3)
    return list(dict.fromkeys(by_part.get(item, item) for item in close)) or names[:3]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def param_groups(plans: Sequence[GroupPlan], parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Return param groups in the form that torch's optimizers accept."""
    return [
        {
            "name": plan.name,
            STEM: plan.stem,
            "params": [parameters[name] for name in plan.names],
            "lr": plan.lr,
            PEAK: plan.lr,
            "weight_decay": plan.weight_decay,
        }
        for plan in plans
    ]
