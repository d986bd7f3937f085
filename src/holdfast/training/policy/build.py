"""Build a policy's run: what can fail before step 1 fails here, on all ranks alike, with nothing written."""

from __future__ import annotations

from pathlib import Path

from holdfast.config.sections.reference import ServerReferenceConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.data.batches.candidates import Tokenise
from holdfast.data.batches.prompts import prompt_tokeniser
from holdfast.data.rows.rows import Source
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ConfigError, DataError
from holdfast.models.layers.expert_choices import why_not_replayed
from holdfast.models.layers.routers import routers_of
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training.build.begin import Live, begin, build_model, parts_of_run
from holdfast.training.build.losses import policy_objective
from holdfast.training.build.model import image_side_of
from holdfast.training.build.rows import (
    Accept,
    OpenedData,
    filter_of,
    first_sequences,
    open_data,
    prompt_stream,
    row_filter,
)
from holdfast.training.engines import open_engine, why_no_videos
from holdfast.training.fingerprints import mark_reward_models
from holdfast.training.policy.build_critic import add_critic
from holdfast.training.policy.offload import check_residency
from holdfast.training.policy.recorder import what_is_deleted
from holdfast.training.policy.run import PolicyEvaluation, PolicyRun, PromptSet, Score
from holdfast.training.policy.walk import walk_a_step
from holdfast.training.run import Evaluation
from holdfast.training.scorers.reference import Reference, build_reference, following_of
from holdfast.training.scorers.reference_server import NO_IMAGES
from holdfast.types import Prompt


def build_policy_run(config: GRPOConfig, base: Path, world: World, score: Score, live: Live | None = None) -> PolicyRun:
    """Return a run that is ready for its first step; nothing has been written.

    Args:
        config: The run.
        base: The YAML's directory.
        world: The ranks.
        score: Scores completions.
        live: Objects in the place of what the configuration names.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    live = live or Live()
    started = begin(config, base, world, live)
    ranks = started.ranks
    measured = _measured(config, base, world, ranks, live)
    if config.rollout.replay_routing:
        ranks.on_all_ranks(lambda: _replay_routing(measured))
    images = _images(config, measured)
    tokenise = _tokeniser(measured, base, images)
    stream = ranks.on_all_ranks(lambda: prompt_stream(config, started.data, tokenise, ranks, base))
    if config.rollout.shared_prefix == "on" and measured.policy.padded:
        why = measured.origin.family.why_not_packed or "data.packing or model.attention says so"
        raise ConfigError(
            f"rollout.shared_prefix: on, but {measured.origin.family.name} is trained with one sequence per row "
            f"({why}), where nothing can be shared. Use auto."
        )
    mark_reward_models(config, base, ranks)
    policy = _policy(base, measured, started.data, tokenise, score, images)
    reference = _reference(config, base, policy, live)
    run = PolicyRun(
        **vars(policy),
        **parts_of_run(config, base, policy, started, stream),
        base=base,
        reference=reference,
        following=following_of(reference, config.reference),
    )
    if config.critic is not None:
        add_critic(run, config.critic, base, live)
    check_residency(run)
    walk_a_step(run)
    if world.is_first and (deleted := what_is_deleted(config)):
        print(f"warning: {deleted}", flush=True)
    return run


def build_policy_evaluation(config: GRPOConfig, base: Path, world: World, score: Score) -> PolicyEvaluation:
    """Return a policy and what it is evaluated with.

    Raises:
        UserError: As `build_policy_run`.
    """
    ranks = RankGroup(config.launch.timeout_minutes)
    needs_training_rows = config.data.validation_split > 0
    data = ranks.first_rank_first(lambda: open_data(config, base, training=needs_training_rows))
    measured = _measured(config, base, world, ranks, Live())
    images = _images(config, measured)
    return _policy(base, measured, data, _tokeniser(measured, base, images), score, images)


def _measured(config: GRPOConfig, base: Path, world: World, ranks: RankGroup, live: Live) -> Evaluation:
    if live.objective is not None:
        compares = getattr(live.objective, "needs_reference", False)
        for section in config.terms_of_ours():
            if section != "kl" or not compares:  # that of a loss which compares says that there is a reference
                raise ConfigError(
                    f"{section}: a loss of your own (objective=) takes nothing from this section. Write it into the "
                    "loss, and leave the section out."
                )
    objective = live.objective or ranks.on_all_ranks(lambda: policy_objective(config, base))
    return build_model(config, base, world, ranks, live, objective)


def _images(config: GRPOConfig, measured: Evaluation) -> ImageSide | str:
    """Return what turns images into tokens; or why no row may have some."""
    if config.rollout.record:
        return "rollout.record keeps no images, so a step with some could not be made again; leave it out"
    if isinstance(config.reference, ServerReferenceConfig) and config.kl.coefficient > 0:
        return NO_IMAGES
    return image_side_of(config, measured.origin)


def _tokeniser(measured: Evaluation, base: Path, images: ImageSide | str) -> Tokenise[Prompt]:
    config, tokenizer = measured.config, measured.origin.tokenizer
    assert isinstance(config, GRPOConfig)
    rows = measured.ranks.on_all_ranks(lambda: RowTokeniser(tokenizer, config.data, base, images))
    longest = config.data.max_length - config.rollout.max_new_tokens
    refusal = why_no_videos(measured, config.rollout.engine)
    return prompt_tokeniser(rows, tokenizer.decode, config.data, longest, refusal)


def _policy(  # noqa: PLR0913 - what a policy is made of
    base: Path,
    measured: Evaluation,
    data: OpenedData,
    tokenise: Tokenise[Prompt],
    score: Score,
    images: ImageSide | str,
) -> PolicyEvaluation:
    config = measured.config
    assert isinstance(config, GRPOConfig)
    rollout = config.rollout
    parts = {name: value for name, value in vars(measured).items() if name not in {"config", "temperature"}}
    accept = measured.ranks.on_all_ranks(lambda: row_filter(config, base))
    return PolicyEvaluation(
        **parts,
        config=config,
        temperature=config.rollout.temperature,
        engine=open_engine(measured, rollout, tells_experts=rollout.replay_routing),
        score=score,
        images=images,
        prompt_sets=tuple(
            PromptSet(name, _prompts(measured, name, source, tokenise, filter_of(source, accept)))
            for name, source in data.evaluation.items()
        ),
    )


def _reference(config: GRPOConfig, base: Path, policy: Evaluation, live: Live) -> Reference | None:
    """Return the reference policy, or None where no KL term needs one."""
    kind, coefficient = config.reference.kind, config.kl.coefficient
    if kind == "none" or coefficient == 0:
        return None
    return build_reference(policy, base, live, config.reference, why=f"kl.coefficient={coefficient:g}")


def _prompts(
    measured: Evaluation, name: str, source: Source, tokenise: Tokenise[Prompt], accept: Accept | None
) -> tuple[Prompt, ...]:
    """Read this rank's share of an evaluation set now, so that what is wrong with it shows before step 1.

    Raises:
        DataError: A row is malformed, or no prompt is short enough; the same on all ranks.
    """
    ranks, limit = measured.ranks, measured.config.evaluation.limit_samples
    prompts = ranks.on_all_ranks(lambda: tuple(first_sequences(source, tokenise, limit, ranks, accept)))
    if not sum(ranks.gather(len(prompts))):
        raise DataError(
            f"evaluation.sets.{name}: no prompt of {source.name} leaves room for a completion in "
            "data.max_length. Raise it."
        )
    return prompts


def _replay_routing(measured: Evaluation) -> None:
    """Have the policy follow the experts of its rollouts.

    Raises:
        ConfigError: Its routers cannot be told, or it has none.
    """
    skeleton = measured.origin.skeleton
    width = skeleton.config.get_text_config().hidden_size
    why = why_not_replayed([router for router, _ in routers_of(skeleton)], width)
    if why is not None:
        raise ConfigError(f"rollout.replay_routing: {measured.origin.family.name} cannot: {why}. Leave it out.")
    measured.policy.replay_routing()
