"""Build a policy's critic: a model of its own, planned, sharded and checked like the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from holdfast.config.verbs.critic import CriticConfig, critic_training
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ConfigError, ModelError, PlanError
from holdfast.models.build.model import Blueprint, blueprint
from holdfast.training.build.begin import Live, trained_of
from holdfast.training.build.model import build_policy
from holdfast.training.policy.run import CRITIC, PolicyRun
from holdfast.training.run import Trained
from holdfast.training.setting import Logbook


def add_critic(run: PolicyRun, section: CriticConfig, live: Live) -> None:
    """Give a policy's run the critic that its configuration asks for.

    Raises:
        ConfigError, ModelError, PlanError: The critic cannot be built, or reads other tokens than the policy writes;
            the same on all ranks.
    """
    with _named():
        critic = _critic(run, section, live)
    run.common.companions[CRITIC] = critic
    run.trained.state.companions[CRITIC] = critic.state


def _critic(run: PolicyRun, section: CriticConfig, live: Live) -> Trained:
    policy, config, ranks = run.trained, critic_training(run.config, section), run.setting.ranks
    _refuse_unread(run, section, live)
    own = section.path is not None
    origin = ranks.first_rank_first(
        lambda: blueprint(
            config.model,
            run.setting.base,
            seed=config.seed,
            tokenizer=None if own else policy.origin.tokenizer,
            scorer=True,
        ),
    )
    ranks.on_all_ranks(lambda: _check_tokens(policy.origin, origin))
    if policy.model.padded:
        config = config.model_copy(update={"data": config.data.model_copy(update={"packing": "none"})})
    if run.setting.world.is_first:
        print("critic: its plan:", flush=True)
    critic = build_policy(replace(run.setting, config=config, log=Logbook()), origin)
    if critic.model.padded and not policy.model.padded:
        raise ConfigError(
            f"{origin.family.name} is trained with one sequence per row ({origin.family.why_not_packed}), and the "
            "policy's are packed. Set data.packing: none."
        )
    trained = trained_of(critic, policy.total_steps)
    trained.residency = policy.residency
    return trained


def _refuse_unread(run: PolicyRun, section: CriticConfig, live: Live) -> None:
    if live.model is not None and section.path is None:
        raise ConfigError(
            "the policy was given in Python (model=), and there are no files of it to start from. Name a directory in "
            "critic.path, such as the one the policy was loaded from."
        )
    if isinstance(run.evaluation.images, ImageSide):
        raise ConfigError(
            f"{run.trained.origin.family.name} sees images, and a critic reads text alone. Use an advantage that "
            "compares completions with each other, such as advantage: grpo."
        )


def _check_tokens(policy: Blueprint, critic: Blueprint) -> None:
    """Compare what each token is called.

    Raises:
        ModelError: Critic and policy disagree on a token.
    """
    one, two = ({number: word for word, number in each.tokenizer.get_vocab().items()} for each in (policy, critic))
    differ = [number for number in sorted({*one, *two}) if one.get(number) != two.get(number)]
    if differ:
        first = differ[0]
        raise ModelError(
            f"its tokenizer is not the policy's: they differ in {len(differ)} tokens, the first of them {first}, which "
            f"is {_word(one, first)} to the policy and {_word(two, first)} to the critic. A critic reads the policy's "
            "tokens as they are. Name a model with the policy's tokenizer in critic.path, or leave it out."
        )


def _word(words: dict[int, Any], number: int) -> str:
    return repr(words[number]) if number in words else "none"


@contextmanager
def _named() -> Iterator[None]:
    """Say of an error that it is about the critic: its keys have other names than the policy's."""
    try:
        yield
    except (ConfigError, ModelError, PlanError) as error:
        raise type(error)(f"The critic (section critic) cannot be built: {error}") from error
