"""Settings of runs that no run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.config.sections.optim import OptimConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training.run import Run


def setting_of(optim: OptimConfig, world: World) -> Run:
    """Return a setting in which something is trained by an optimizer of this section."""
    return plain_setting(SFTConfig.model_construct(optim=optim), world)


def plain_setting(config: Any, world: World) -> Run:
    """Return the setting of a configuration that names files from the current directory."""
    return Run(config=config, base=Path(), world=world, ranks=RankGroup())
