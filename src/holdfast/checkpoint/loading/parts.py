"""The parts of a run's state in a checkpoint: a model with its optimizer and averages, under a prefix of names.

The trained model has no prefix. Companions, such as a policy's critic or a reference that follows its weights, have
their name: critic.model.<parameter>, critic.optim.<parameter>.<key>. All tensors are in the same files, so that one
commit and one verification cover them, and code that reads the main model alone needs no change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import TRAINED, LiveTensors, hold
from holdfast.parallel.shards import sharded_parameters

COMPANIONS = "companions"
"""Key of a manifest's `optimizer` that holds those of companions, by name."""


class Companion(NamedTuple):
    """A further model to save or load, and its optimizer."""

    model: nn.Module
    optimizer: Optimizer | None
    """None for a frozen model that follows the trained one."""
    moved: Collection[str] = ()
    """Parameters of a following model that change; only these are saved."""

    def held(self) -> LiveTensors:
        """Return the tensors of the companion that are saved."""
        return hold(self.model, frozen=self.optimizer is not None, later=self.moved)


@dataclass(frozen=True)
class Part:
    """A live model into which a part of a checkpoint is loaded, with its optimizer and averages."""

    name: str
    """Of a companion; empty for the trained model."""
    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer | None = None
    averages: Mapping[str, Tensor] | None = None
    """Averages of trained parameters; None ignores those of a checkpoint."""

    @property
    def prefix(self) -> str:
        """Beginning of the stored names of its tensors."""
        return f"{self.name}." if self.name else ""

    def manifest_in(self, manifest: Manifest) -> Manifest:
        """Return the manifest of this part alone, without its prefix in names."""
        if not self.name:
            return manifest
        optimizers: Mapping[str, Any] = (manifest.optimizer or {}).get(COMPANIONS, {})
        return replace(
            manifest,
            tensors=self.own(manifest.tensors),
            ties={},
            optimizer=optimizers.get(self.name),
            contents=("model",) if self.optimizer is not None else (TRAINED,),
        )

    def own(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what of a mapping by stored names is this part's, without its prefix."""
        return {key.removeprefix(self.prefix): value for key, value in values.items() if key.startswith(self.prefix)}


def live_parts(
    model: nn.Module,
    optimizer: Optimizer | None,
    averages: Mapping[str, Tensor] | None = None,
    companions: Mapping[str, Companion] | None = None,
) -> list[Part]:
    """Return the trained model, and its companions in the order of their names, as parts."""
    main = Part("", model, sharded_parameters(model), optimizer, averages)
    return [
        main,
        *(
            Part(name, companion.model, sharded_parameters(companion.model), companion.optimizer)
            for name, companion in sorted((companions or {}).items())
        ),
    ]
