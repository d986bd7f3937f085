"""Parameters that are frozen at first: out of the optimizer until their step, and in its groups from then on.

They get their group, with its rate and decay, when the optimizer is built, and are taken out of it again. Their state
begins with their first update, as that of any parameter does, with a count of steps of its own, and their averages
begin at their weights. Which of them are trained follows from the steps done alone, so it is the same after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.models.build.freezing import Stage
from holdfast.optim.averages import Averages


@dataclass
class Unfreezing:
    """What a run trains at which step.

    Args:
        stages: By step; none where all that is ever trained is trained from the start.
        optimizer: Built over everything that is ever trained.
        parameters: Sharded, by canonical name.
        averages: Of all that is ever trained, if the run keeps some.
    """

    stages: Sequence[Stage]
    optimizer: Optimizer
    parameters: Mapping[str, nn.Parameter]
    averages: Averages | None = None
    _groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = field(init=False)

    def __post_init__(self) -> None:
        self._groups = [(group, list(group["params"])) for group in self.optimizer.param_groups]
        if self.stages:
            self.set_step(0)

    def after(self, step: int) -> list[int]:
        """Return the steps, after one, at whose end something is unfrozen."""
        return sorted({stage.at_step for stage in self.stages if stage.at_step > step})

    @property
    def names(self) -> frozenset[str]:
        """All that is frozen at first."""
        return frozenset(name for stage in self.stages for name in stage.names)

    def changing(self, step: int) -> list[Stage]:
        """Return the stages that are frozen and are not after so many steps, or the other way round."""
        return [
            stage for stage in self.stages if self.parameters[stage.names[0]].requires_grad != (step >= stage.at_step)
        ]

    def set_step(self, step: int) -> None:
        """Train what is trained after so many steps.

        No unit of the model may be gathered: what is gathered keeps the flags it was gathered with.
        """
        for stage in self.changing(step):
            for name in stage.names:
                parameter = self.parameters[name]
                parameter.requires_grad_(step >= stage.at_step)
                if self.averages is not None and not parameter.requires_grad:
                    self.averages.tensors.pop(name, None)
                elif self.averages is not None:
                    self.averages.begin({name: parameter})
        for group, members in self._groups:
            group["params"] = [parameter for parameter in members if parameter.requires_grad]
        self.optimizer.param_groups[:] = [group for group, _ in self._groups if group["params"]]

    @contextmanager
    def as_after(self, step: int, now: int) -> Iterator[None]:
        """Look within the block as after a later step, to try what will be; nothing is computed meanwhile."""
        self.set_step(step)
        try:
            yield
        finally:
            self.set_step(now)
