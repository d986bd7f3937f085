"""Models beside a policy: the `critic` section, and the trees that a critic or a sharded reward model is built by."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from holdfast.config.base import ByKind, Count, Pattern, Positive, PublicStr, Section
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.optim import CriticOptimConfig
from holdfast.config.sections.parallel import NoRecompute
from holdfast.config.sections.reward import ModelRewardConfig
from holdfast.config.verbs.training import TrainingConfig


class CriticConfig(Section):
    """The critic of `advantage: gae`: before every token of a completion, the reward that is still to come
    (Schulman et al., arXiv:1707.06347). It is built, sharded and stored like the policy (`model`, `parallel`)."""

    path: PublicStr | None = None
    """Files that the critic starts from: those of a language model, whose output layer is replaced by a new layer
    `score`, or those of a reward model. Default: those of the policy, without adapters. The tokenizer must be the
    policy's.
    """
    freeze: list[Pattern] = Field(default_factory=list)
    """Parameters of the critic that are not trained, as in `model.freeze`."""
    optim: Annotated[CriticOptimConfig, ByKind("adamw")] = CriticOptimConfig()
    """Optimizer, schedule and gradient clipping of the critic."""
    value_clip: Positive | None = 0.2
    """A value has no gradient once it moved further than this from its number before the first update of the rollout,
    unless it moved away from the return; null: no bound.
    """
    warmup_steps: Count = 0
    """Steps at the start in which the critic alone learns, and the policy stands still."""


class CriticTraining(TrainingConfig):
    """What a critic is trained by: the run's own tree with its model and its optimizer in the place of the policy's.

    It is derived from a tree whose rules were kept, and never read from a file.
    """

    verb = "grpo"
    scores = True
    values = True


def critic_training(config: TrainingConfig, critic: CriticConfig) -> CriticTraining:
    """Return the tree that a critic is built and trained by."""
    values: dict[str, Any] = {name: getattr(config, name) for name in CriticTraining.model_fields}
    return CriticTraining.model_construct(
        **values | {"model": critic_model(config.model, critic), "optim": critic.optim.as_optim()}
    )


def critic_model(model: ModelConfig, critic: CriticConfig) -> ModelConfig:
    """Return the `model` section of a critic: the policy's, with its own origin and its own frozen parameters."""
    changed: dict[str, Any] = {"lora": None, "freeze": critic.freeze}
    if critic.path is not None:
        defaults = ModelConfig(path=critic.path)
        origin = ("path", "config", "revision", "tokenizer", "image_processor", "config_override", "resize_vocab")
        changed |= {name: getattr(defaults, name) for name in origin}
    return model.model_copy(update=changed)


class RewardScoring(TrainingConfig):
    """How a model scores texts that is nobody's policy and is never trained.

    It is derived from a tree whose rules were kept, and never read from a file.
    """

    verb = "grpo"
    scores = True


def reward_scoring(config: TrainingConfig, section: ModelRewardConfig) -> RewardScoring:
    """Return the tree that a sharded reward model is built by: over the policy's ranks, in a layout of its own."""
    values: dict[str, Any] = {name: getattr(config, name) for name in RewardScoring.model_fields}
    changed = {
        "model": ModelConfig(path=section.path, dtype=section.dtype),
        "data": config.data.model_copy(update={"packing": "best_fit"}),
        "parallel": config.parallel.of_frozen(
            in_host_memory="parameters" in config.parallel.offloads or section.place == "offloaded"
        ).model_copy(
            update={
                "compute_dtype": section.dtype,
                "units": [],  # names of the policy's modules
                "reshard": True,  # no backward pass asks for what was gathered
                "recompute": NoRecompute(),
                "compile": "off",
            }
        ),
    }
    return RewardScoring.model_construct(**values | changed)
