"""What a run must remember between steps; all of it JSON-ready."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Progress of a run. Weights, optimizer state, random state and the data cursor are saved beside it."""

    step: int = 0
    """Steps done, those whose updates were skipped included."""
    updates: int = 0
    """Optimizer updates done or skipped: one per step, or several on one rollout."""
    tokens: int = 0
    """Tokens trained on, padding not counted."""
    samples: int = 0
    skipped_steps: int = 0
    """Updates skipped for a non-finite gradient norm."""
    skipped_in_a_row: int = 0
    unscored_in_a_row: int = 0
    """Steps since one had a completion that could be scored."""
    best_exported: float | None = None
    """Value of checkpoint.export_best's metric in exports/best."""
    controllers: dict[str, float] = field(default_factory=dict)
    """Coefficients that follow a target, by name."""
    observers: dict[str, Any] = field(default_factory=dict)
    """Each observer's own state, by its path."""
    companions: dict[str, TrainState] = field(default_factory=dict)
    """Progress of models that are trained beside this one, by name."""

    def as_plain(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)
