"""What a checkpoint of a run holds: its model and optimizer, those trained beside them, and where the run stands."""

from __future__ import annotations

from torch.optim import Optimizer

from holdfast.checkpoint.companions import joined
from holdfast.checkpoint.rehearsal import Trained
from holdfast.checkpoint.snapshot import Held, Outline, Snapshot, hold, outline, take
from holdfast.training.assets import run_assets
from holdfast.training.emergency import Moment
from holdfast.training.run import Run


class Contents:
    """Looks the tensors up once; what they hold is read whenever a snapshot is taken."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._full = run.config.checkpoint.contents == "full"
        self.held: Held = hold(
            run.policy,
            frozen=run.config.checkpoint.frozen == "save",
            averages=run.averages.tensors if run.averages is not None else None,
            later=run.unfreezing.names,
        )
        self._companions = run.beside
        self._beside = {name: each.held() for name, each in self._companions.items()}

    @property
    def optimizer(self) -> Optimizer | None:
        """Whose state is saved; None where weights alone are."""
        return self._run.optimizer if self._full else None

    def beside(self) -> dict[str, Trained]:
        """Return what is saved of models beside the run's own, by name."""
        companions = self._companions
        return {name: (held, companions[name].optimizer if self._full else None) for name, held in self._beside.items()}

    def snapshot(self, moment: Moment) -> Snapshot:
        """Return all of it as it stands at a moment between two steps."""
        run = self._run
        own = take(
            self.held,
            self.optimizer,
            shared={"state": dict(moment.state), "stream": dict(moment.stream)},
            assets=run_assets(run) if run.world.is_first else {},
            random_then=moment.random,
        )
        return self._with_beside(own)

    def outline(self) -> Outline:
        """Return shape, dtype and trained flag of every tensor, by name."""
        return outline(self._with_beside(take(self.held, self.optimizer)))

    def _with_beside(self, own: Snapshot) -> Snapshot:
        return joined(own, {name: take(held, optimizer) for name, (held, optimizer) in self.beside().items()})
