"""Where a run takes place and what it is asked for; nothing of it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from holdfast.config.base import Section
from holdfast.config.verbs.training import TrainingConfig
from holdfast.metrics.clock import PhaseClock
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training.directory import run_directory


@dataclass(kw_only=True)
class Logbook:
    """What a run has to say: the journal writes it down, and empties the lists."""

    clock: PhaseClock = field(default_factory=PhaseClock)
    messages: list[str] = field(default_factory=list)
    """What a step or an evaluation has to tell the user; rank 0 prints it."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Completions of a step; rank 0 writes them to samples.jsonl."""
    resumed_metrics: dict[str, float] = field(default_factory=dict)
    """Of the checkpoint that the run continues from."""


@dataclass(kw_only=True)
class RunFile:
    """A configuration, and the folder that its paths begin at."""

    config: TrainingConfig
    base: Path
    """Directory of the run's YAML, where its files are looked up."""

    @property
    def directory(self) -> Path:
        """Where the run writes."""
        return run_directory(self.config)

    def with_sections(self, **sections: Section) -> Self:
        """Return the same with other sections of the configuration."""
        return replace(self, config=self.config.model_copy(update=sections))


@dataclass(kw_only=True)
class Setting(RunFile):
    """A run's file, the ranks that carry it out, and what they say of it."""

    world: World
    ranks: RankGroup
    log: Logbook = field(default_factory=Logbook)
    interrupted: Callable[[], bool] = lambda: False
    """Whether this rank was asked to stop; long work may be left for it."""

    @classmethod
    def of(cls, config: TrainingConfig, base: Path, world: World) -> Setting:
        """Return a setting with a group of its own; all ranks call this together."""
        return cls(config=config, base=base, world=world, ranks=RankGroup(config.launch.timeout_minutes))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time towards a phase, and name the phase if this rank fails in it."""
        with self.log.clock.phase(name), self.world.failure.phase(name):
            yield
