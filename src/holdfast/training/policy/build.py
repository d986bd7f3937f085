"""Build the run of a policy. Everything that can fail before step 1 fails here, on all ranks, before any file is
written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from holdfast.advantages.group import RewardMatrix
from holdfast.advantages.user import Groups, user_advantages
from holdfast.config.sections.advantage import UserAdvantageConfig
from holdfast.config.sections.reference import ServerReferenceConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.data.batches.candidates import Tokenise, prompt_tokeniser
from holdfast.data.content.images import LeftOutByRun
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.environments.pool import EnvironmentPool
from holdfast.errors import ConfigError, DataError
from holdfast.models.setup.model import Blueprint
from holdfast.models.support import Support
from holdfast.objectives.base import Objective
from holdfast.parallel.mesh import World
from holdfast.rollout.engine import AheadEngine, EpisodeRecords
from holdfast.training.engines import open_engine, why_no_videos
from holdfast.training.fingerprints import mark_reward_models
from holdfast.training.observe import load_function
from holdfast.training.other_models.reference import NO_IMAGES, Reference, build_reference, following_of
from holdfast.training.policy.ahead import CompletionsAhead
from holdfast.training.policy.critic import add_critic
from holdfast.training.policy.episodes import LocalEpisodes, episodes_of
from holdfast.training.policy.episodes_ahead import EpisodesAhead
from holdfast.training.policy.reward_columns import refuse_absent_columns
from holdfast.training.policy.run import (
    CRITIC,
    Episodes,
    PolicyEvaluation,
    PolicyTraining,
    PromptSet,
    Sampler,
    Score,
    note_what_stays,
)
from holdfast.training.rollout_memory import deal_memory
from holdfast.training.run import Model, Run
from holdfast.training.setup.begin import Live, RunSetup, begin, begin_evaluation, build_model, training_of
from holdfast.training.setup.first_rows import check_first_rows
from holdfast.training.setup.losses import policy_objective
from holdfast.training.setup.model import image_side_of
from holdfast.training.setup.rows import (
    filter_of,
    first_sequences,
    prompt_stream,
    row_filter,
)
from holdfast.training.setup.updates import settle_update_form
from holdfast.types import Prompt


def build_policy_run(  # noqa: PLR0913 - a run's parts, and what rewards need
    config: GRPOConfig,
    base: Path,
    world: World,
    score: Score,
    live: Live | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
    environments: EnvironmentPool | None = None,
) -> PolicyTraining:
    """Return a run that is ready for its first step; nothing has been written.

    Args:
        config: The run.
        base: The YAML's directory.
        world: The ranks.
        score: Scores completions.
        live: Objects in the place of what the configuration names.
        columns: Columns that rewards need, by their names.
        environments: Started, where the configuration has some.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    run, live = Run.of(config, base, world), live or Live()
    setup = begin(run, live)
    read = _read(config, setup, columns, environments)
    with run.ranks.together():
        stream = prompt_stream(run, setup.data, read.tokenise)
        advantage = _user_advantage(config, run)
    mark_reward_models(run)
    evaluation = _evaluation(setup, read, score)
    reference = _reference(config, evaluation.model, live)
    training = PolicyTraining(
        **vars(training_of(setup, evaluation, stream)), reference=reference, user_advantage=advantage
    )
    evaluation.stream = training.stream
    if config.rollout.max_staleness:
        training.ahead = _ahead(config, evaluation)
    training.model.following = following_of(reference, config.reference)
    if config.critic is not None:
        add_critic(training, config.critic, live)
        settle_update_form(training.companions[CRITIC])
    _deal_memory(config, evaluation, companions=training.companions.values())
    note_what_stays(training)
    if world.is_first and (deleted := unreplayable_steps(config)):
        print(f"warning: {deleted}", flush=True)
    return training


def build_policy_evaluation(  # noqa: PLR0913 - as above
    config: GRPOConfig,
    base: Path,
    world: World,
    score: Score,
    columns: Mapping[str, Sequence[str]] | None = None,
    environments: EnvironmentPool | None = None,
) -> PolicyEvaluation:
    """Return a policy and the parts of its evaluation.

    Raises:
        UserError: As `build_policy_run`.
    """
    setup = begin_evaluation(Run.of(config, base, world))
    evaluation = _evaluation(setup, _read(config, setup, columns, environments), score)
    _deal_memory(config, evaluation, trains=False)
    return evaluation


@dataclass(frozen=True)
class _Read:
    """A policy on its ranks, and the functions that make prompts and episodes of rows."""

    config: GRPOConfig
    model: Model
    objective: Objective
    images: ImageSide | str
    tokenise: Tokenise[Prompt]
    episodes: Episodes | None


def _read(
    config: GRPOConfig,
    setup: RunSetup,
    columns: Mapping[str, Sequence[str]] | None,
    environments: EnvironmentPool | None,
) -> _Read:
    """Build the policy, and read its rows; all ranks call this together."""
    run = setup.run
    with run.ranks.together():
        objective = _objective(config, setup)
    model = _policy(config, setup, columns, environments)
    with run.ranks.together():
        images = _images(config, model.blueprint)
        rows = _rows(config, run, model.blueprint, images, environments)
        tokenise = _prompts(config, model.blueprint, rows, why_no_videos(model, config.rollout.engine))
        episodes = episodes_of(config, environments, model, rows)
        _check_shared_prefix(config, model)
    return _Read(config, model, objective, images, tokenise, episodes)


def _evaluation(setup: RunSetup, read: _Read, score: Score) -> PolicyEvaluation:
    """Open the engine and read the evaluation sets; all ranks call this together."""
    return PolicyEvaluation(
        model=read.model,
        objective=read.objective,
        sampler=_sampler(read.config, read.model),
        score=score,
        images=read.images,
        prompt_sets=_prompt_sets(setup, read.model, read.tokenise),
        several_sources=len(setup.data.training) > 1,
        episodes=read.episodes,
    )


def _ahead(config: GRPOConfig, evaluation: PolicyEvaluation) -> CompletionsAhead | None:
    """Return what samples completions of the next steps; None where all episodes were recorded."""
    engine, episodes = evaluation.sampler.engine, evaluation.episodes
    if episodes is None:
        assert isinstance(engine, AheadEngine)
        return CompletionsAhead(engine, config)
    if isinstance(engine, EpisodeRecords):
        return None
    assert isinstance(episodes, LocalEpisodes)
    return CompletionsAhead(EpisodesAhead(episodes, evaluation), config)


def unreplayable_steps(config: GRPOConfig) -> str:
    """Return which of the steps that are kept cannot be made again, since no checkpoint will be; "" if all can."""
    section, keep = config.checkpoint, config.checkpoint.keep
    keeps_all = config.steps is not None and config.steps <= keep.last
    if not config.rollout.record or (section.every_steps == 1 and (keep.every == 1 or keeps_all)):
        return ""
    saved = "by the clock alone" if section.every_steps is None else f"every {section.every_steps} steps"
    checkpoints = f"the last {keep.last}" + ("" if keep.every is None else f" and those of every {keep.every} steps")
    return (
        f"rollout.record: step N is made again from the checkpoint of step N-1; checkpoints are saved {saved}, and of "
        f"them {checkpoints} stay, so most steps cannot be replayed. Set checkpoint.every_steps and "
        "checkpoint.keep.every to 1, or to the distance of the steps that you may want."
    )


def _objective(config: GRPOConfig, setup: RunSetup) -> Objective:
    if setup.live.objective is not None:
        compares = getattr(setup.live.objective, "needs_reference", False)
        for section in config.terms_of_ours():
            if section != "kl" or not compares:  # that of a loss which compares says that there is a reference
                raise ConfigError(
                    f"{section}: a loss of your own (objective=) takes nothing from this section. Write it into the "
                    "loss, and leave the section out."
                )
    return setup.live.objective or policy_objective(config, setup.run)


def _user_advantage(config: GRPOConfig, run: Run) -> Callable[[Groups], RewardMatrix] | None:
    """Return what makes the advantages, if it is the user's own.

    Raises:
        ConfigError: It is not there.
    """
    section = config.advantage
    if not isinstance(section, UserAdvantageConfig):
        return None
    function = partial(load_function(section.path, run.base, "advantage.path"), **section.kwargs)
    return partial(user_advantages, function, name=section.path)


def _policy(
    config: GRPOConfig,
    setup: RunSetup,
    columns: Mapping[str, Sequence[str]] | None,
    environments: EnvironmentPool | None,
) -> Model:
    run = setup.run

    def look(origin: Blueprint) -> None:
        with run.ranks.together():
            refuse_absent_columns(setup.data, columns or {}, skips=config.data.on_bad_row == "skip")
            rows = _rows(config, run, origin, _images(config, origin), environments)
            tokenise = _prompts(config, origin, rows)
        check_first_rows(run, setup.data, tokenise, sees=origin.image_processor is not None)

    model = build_model(run, setup.live, look)
    model.temperature = config.rollout.temperature
    if config.rollout.renormalise:
        support = Support(config.rollout.top_k, config.rollout.top_p, config.rollout.min_p)
        model.module.head_spec = replace(model.module.head_spec, support=support)
    return model


def _sampler(config: GRPOConfig, model: Model) -> Sampler:
    # Turns are decoded operation by operation, since their prompts grow: no recording is tried for them.
    graphs = config.rollout.graphs if config.environment is None else "off"
    rollout = config.rollout.model_copy(update={"graphs": graphs})
    return Sampler(open_engine(model, rollout))


def _deal_memory(
    config: GRPOConfig, evaluation: PolicyEvaluation, *, companions: Iterable[Model] = (), trains: bool = True
) -> None:
    engine, model, context = evaluation.sampler.engine, evaluation.model, config.longest_context
    deal_memory(engine, model, config.rollout, context, companions=companions, trains=trains)


def _images(config: GRPOConfig, origin: Blueprint) -> ImageSide | str:
    """Return what turns images into tokens; or why no row may have some."""
    if config.environment is not None:
        return LeftOutByRun("environment: episodes are text alone; leave the section out, or use rows without images")
    if config.rollout.record:
        return LeftOutByRun(
            "rollout.record: no images are kept, so a step with some could not be made again; set false"
        )
    if isinstance(config.reference, ServerReferenceConfig) and config.kl.coefficient > 0:
        return NO_IMAGES
    return image_side_of(config, origin)


def _rows(
    config: GRPOConfig,
    run: Run,
    origin: Blueprint,
    images: ImageSide | str,
    environments: EnvironmentPool | None,
) -> RowTokeniser:
    tools = None if config.environment is None or environments is None else environments.tools_of
    return RowTokeniser(origin.tokenizer, config.data, run.base, images, tools=tools)


def _prompts(config: GRPOConfig, origin: Blueprint, rows: RowTokeniser, refusal: str = "") -> Tokenise[Prompt]:
    return prompt_tokeniser(rows, origin.tokenizer.decode, config.data, config.longest_prompt, refusal)


def _reference(config: GRPOConfig, policy: Model, live: Live) -> Reference | None:
    """Return the reference policy, or None where no KL term needs one."""
    kind, coefficient = config.reference.kind, config.kl.coefficient
    if kind == "none" or coefficient == 0:
        return None
    return build_reference(policy, live, config.reference, why=f"kl.coefficient={coefficient:g}")


def _prompt_sets(setup: RunSetup, model: Model, tokenise: Tokenise[Prompt]) -> tuple[PromptSet, ...]:
    """Read this rank's share of the evaluation sets now, so that what is wrong with them shows before step 1.

    Raises:
        DataError: A row is malformed, or no prompt is short enough; the same on all ranks.
    """
    run, limit = model.run, model.run.config.evaluation.limit_samples
    ranks, sets = run.ranks, []
    with ranks.together():
        accept = row_filter(run)
    for name, source in setup.data.evaluation.items():
        with ranks.together():
            prompts = tuple(first_sequences(source, tokenise, limit, ranks, filter_of(source, accept)))
        if not sum(ranks.gather(len(prompts))):
            raise DataError(
                f"evaluation.sets.{name}: no prompt of {source.name} leaves room for a completion in "
                "data.max_length, or is within data.max_prompt_length. Raise it."
            )
        sets.append(PromptSet(name, prompts))
    return tuple(sets)


def _check_shared_prefix(config: GRPOConfig, model: Model) -> None:
    if config.rollout.shared_prefix == "on" and model.module.padded:
        why = model.blueprint.family.why_not_packed or "data.packing or model.attention says so"
        raise ConfigError(
            f"rollout.shared_prefix: on, but {model.blueprint.family.name} is trained with one sequence per row "
            f"({why}), where nothing can be shared. Use auto."
        )
