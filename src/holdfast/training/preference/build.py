"""Build a run on preferences: what can fail before step 1 fails here, on all ranks alike, with nothing written.

But for one file: with `reference.precompute`, what the reference says of all rows is kept for later starts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from holdfast.config.sections.reference import ServerReferenceConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.data.batches.assembly import Layout
from holdfast.data.batches.candidates import Tokenise
from holdfast.data.tokens.preferences import preferred_only
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ConfigError
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training.build.begin import Live, begin, build_model, layout_of, parts_of_run
from holdfast.training.build.losses import preference_objective
from holdfast.training.build.model import image_side_of
from holdfast.training.build.rows import (
    OpenedData,
    SetReading,
    evaluation_sets,
    open_data,
    preference_tokeniser,
    refuse_completions_with_images,
    row_filter,
    training_stream,
)
from holdfast.training.preference.run import PreferenceEvaluation, PreferenceRun
from holdfast.training.run import Evaluation
from holdfast.training.scorers.reference import Reference, build_reference, following_of
from holdfast.training.scorers.reference_server import NO_IMAGES
from holdfast.training.scorers.table import LOGPROB_COLUMN, TableInputs, refuse_without_other_answers, with_table
from holdfast.types import Example


def build_preference_run(config: DPOConfig, base: Path, world: World, live: Live | None = None) -> PreferenceRun:
    """Return a run that is ready for its first step.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    live = live or Live()
    started = begin(config, base, world, live)
    ranks, data = started.ranks, started.data
    ranks.on_all_ranks(lambda: refuse_without_other_answers(config, data))
    objective = live.objective or ranks.on_all_ranks(lambda: preference_objective(config.preference, base))
    measured = build_model(config, base, world, ranks, live, objective)
    policy, tokenise = _compared_policy(config, base, measured, data, live)
    stream = ranks.on_all_ranks(lambda: training_stream(config, data, tokenise, ranks, policy.layout, base))
    parts = parts_of_run(config, base, policy, started, stream)
    # Its log-likelihood would be that of chosen and rejected answers together, which says nothing.
    parts["source_names"] = ()
    return PreferenceRun(**vars(policy), **parts, following=following_of(policy.reference, config.reference))


def build_preference_evaluation(config: DPOConfig, base: Path, world: World) -> PreferenceEvaluation:
    """Return a policy, its evaluation sets, and what it is compared with.

    Raises:
        UserError: As `build_preference_run`.
    """
    ranks = RankGroup(config.launch.timeout_minutes)
    needs_training_rows = config.data.validation_split > 0
    data = ranks.first_rank_first(lambda: open_data(config, base, training=needs_training_rows))
    objective = ranks.on_all_ranks(lambda: preference_objective(config.preference, base))
    measured = build_model(config, base, world, ranks, Live(), objective)
    # Of an evaluation alone nothing is kept, and training rows are not scored.
    live_reference = config.reference.model_copy(update={"precompute": False, "cache": None})
    config = config.model_copy(update={"reference": live_reference})
    return _compared_policy(config, base, measured, data, Live())[0]


def _compared_policy(
    config: DPOConfig, base: Path, measured: Evaluation, data: OpenedData, live: Live
) -> tuple[PreferenceEvaluation, Tokenise[Example]]:
    """Return the policy with its reference and evaluation sets, and the function that makes sequences of rows."""
    ranks = measured.ranks
    images = _images(config, measured)
    layout = ranks.on_all_ranks(lambda: _layout(config, measured, images))
    plain = ranks.on_all_ranks(lambda: preference_tokeniser(measured.origin.tokenizer, config, base, images))
    accept = ranks.on_all_ranks(lambda: row_filter(config, base))
    tokenise: Tokenise[Example] = plain
    of_sets: dict[str, Tokenise[Example]] = dict.fromkeys(data.evaluation, plain)
    reference: Reference | None = None
    if config.preference.needs_reference and config.reference.precompute:
        inputs = TableInputs(config, base, measured, data, live, layout, plain, accept)
        tokenise, of_sets = with_table(inputs)
        layout = replace(
            layout,
            columns={**layout.columns, LOGPROB_COLUMN: np.float64},
            brings_other_answers=config.fixes_other_answers,
        )
    elif config.preference.needs_reference:
        why = f"preference.loss: {', '.join(config.preference.kinds)}"
        reference = build_reference(measured, base, live, config.reference, why=why)
    reading = SetReading(of_sets, accept, preferred_only(plain))
    sets = evaluation_sets(config, data, reading, ranks, layout)
    ranks.on_all_ranks(lambda: refuse_completions_with_images(config, sets, images))
    fields = vars(measured) | {"config": config, "evaluation_sets": sets}
    return PreferenceEvaluation(**fields, layout=layout, reference=reference), tokenise


def _images(config: DPOConfig, measured: Evaluation) -> ImageSide | str:
    """Return what turns images into tokens; or why no row may have some."""
    if isinstance(config.reference, ServerReferenceConfig) and config.preference.needs_reference:
        return NO_IMAGES
    return image_side_of(config, measured.origin)


def _layout(config: DPOConfig, measured: Evaluation, images: ImageSide | str) -> Layout:
    """Return how pairs, or single answers, are packed.

    Raises:
        ConfigError: Prompts shall be shared, and cannot.
    """
    pairs, padded = config.preference.takes_pairs, measured.policy.padded
    if config.data.shared_prompt == "on" and padded:
        reason = measured.origin.family.why_not_packed or "data.packing or model.attention says so"
        raise ConfigError(
            f"data.shared_prompt: on, but {measured.origin.family.name} is trained with one sequence per row "
            f"({reason}): a prompt stands in each. Use auto."
        )
    return replace(
        layout_of(measured, images),
        whole_draws=pairs,
        shares_heads=pairs and not padded and config.data.shared_prompt != "off",
        columns={} if pairs else {"desirable": np.bool_},
    )
