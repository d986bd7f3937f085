"""Training of a reward model.

Of two answers to a prompt, raise the score of the chosen one above that of the rejected one (Ouyang et al.,
arXiv:2203.02155, eq. 1). The update is that of preferences; what differs is the model, which scores whole texts.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.config.verbs.dpo import ScorerConfig
from holdfast.parallel.mesh import World
from holdfast.recipes.dpo import train_preferences
from holdfast.training.fit import Outcome
from holdfast.training.preference.build import build_preference_run
from holdfast.training.setup.begin import Live


def reward(config: ScorerConfig, base: Path, world: World, live: Live | None = None) -> Outcome:
    """Train, evaluate and export as the configuration says."""
    return train_preferences(build_preference_run(config, base, world, live))
