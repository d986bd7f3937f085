"""The optional forms of a run's models: recorded in its checkpoints, used again, and told where they change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.training.run import Model, Training

EVENT = "form"
"""A form that was chosen, or given up by a rank: event of events.jsonl, and first part of a column's name."""

LostForm = tuple[str, str, str]
"""Model, "" for the run's own, form and reason."""


def resume_forms(training: Training) -> list[str]:
    """Use the forms that the checkpoint recorded; return a line for each that this start cannot have.

    All ranks call this together, after the checkpoint was loaded.
    """
    lines = []
    for model, trained in _models(training).items():
        recorded = trained.state.forms
        if recorded is None and not model:
            recorded = training.run.world.forms
        lines += trained.forms.resume(recorded)
    record_forms(training)
    return lines


def record_forms(training: Training) -> None:
    """Let checkpoints record the forms that are used."""
    for model in _models(training).values():
        model.state.forms = model.forms.record


def lost_forms(training: Training) -> list[LostForm]:
    """Return what this rank has given up since the last call."""
    lost = []
    for model, trained in _models(training).items():
        lost += [(model, name, reason) for name, reason in trained.forms.lost]
        trained.forms.lost.clear()
    return lost


class FormNews:
    """What changed in the forms since it was told last."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._without: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        """Model and form -> ranks that have given it up."""

    def take(self, lost: Sequence[Sequence[LostForm]] = ()) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Return an event for each change, and the columns of what changed: the part of the ranks that use a form.

        Args:
            lost: What ranks have given up, in their order.
        """
        events, columns = [], {}
        for model, trained in _models(self._training).items():
            for standing in trained.forms.news:
                values = {"value": standing.value, "reason": standing.reason, "speedups": list(standing.speedups)}
                events.append(_named(model, standing.name) | values)
                columns[_column(model, standing.name)] = float(standing.value > 0)
            trained.forms.news.clear()
        for rank, several in enumerate(lost):
            for model, name, reason in several:
                without = self._without[model, name]
                without.add(rank)
                events.append(_named(model, name) | {"value": 0, "rank": rank, "reason": reason})
                columns[_column(model, name)] = 1 - len(without) / len(lost)
        return events, columns


def _models(training: Training) -> Mapping[str, Model]:
    return {"": training.model, **training.companions}


def _named(model: str, name: str) -> dict[str, Any]:
    return {"form": name, **({"model": model} if model else {})}


def _column(model: str, name: str) -> str:
    return "/".join(filter(None, (model, EVENT, name)))
