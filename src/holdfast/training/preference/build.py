"""Build a run on preferences. Everything that can fail before step 1 fails here, before any file is written.

There is one exception: with `reference.precompute`, the reference's log-probabilities of all rows are stored in a file
for later starts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from holdfast.config.sections.reference import ServerReferenceConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.data.batches.assembly import Layout
from holdfast.data.batches.candidates import Tokenise
from holdfast.data.tokens.preferences import preferred_only
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ConfigError
from holdfast.models.setup.model import Blueprint
from holdfast.parallel.mesh import World
from holdfast.training.engines import layout_of
from holdfast.training.other_models.reference import NO_IMAGES, Reference, build_reference, following_of
from holdfast.training.other_models.table import LOGPROB_COLUMN, TableInputs, with_table
from holdfast.training.preference.run import PreferenceEvaluation, PreferenceTraining
from holdfast.training.run import Model, Run
from holdfast.training.setup.begin import Live, RunSetup, begin, begin_evaluation, build_model, training_of
from holdfast.training.setup.first_rows import check_first_rows
from holdfast.training.setup.losses import preference_objective
from holdfast.training.setup.model import image_side_of
from holdfast.training.setup.rows import (
    SetReading,
    opened_sets,
    preference_tokeniser,
    refuse_completions_with_images,
    row_filter,
    training_stream,
)
from holdfast.types import Example


def build_preference_run(config: DPOConfig, base: Path, world: World, live: Live | None = None) -> PreferenceTraining:
    """Return a run that is ready for its first step.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    setup = begin(Run.of(config, base, world), live or Live())
    evaluation, tokenise = _evaluation(config, setup)
    with setup.run.ranks.together():
        stream = training_stream(setup.run, setup.data, tokenise, evaluation.layout)
    training = PreferenceTraining(**vars(training_of(setup, evaluation, stream)))
    training.model.following = following_of(evaluation.reference, config.reference)
    return training


def build_preference_evaluation(config: DPOConfig, base: Path, world: World) -> PreferenceEvaluation:
    """Return a policy, its evaluation sets, and what it is compared with.

    Raises:
        UserError: As `build_preference_run`.
    """
    # Of an evaluation alone nothing is kept, and training rows are not scored.
    reference = config.reference.model_copy(update={"precompute": False, "cache": None})
    config = config.model_copy(update={"reference": reference})
    return _evaluation(config, begin_evaluation(Run.of(config, base, world)))[0]


def _evaluation(config: DPOConfig, setup: RunSetup) -> tuple[PreferenceEvaluation, Tokenise[Example]]:
    """Return the policy with its reference and evaluation sets, and the function that makes sequences of rows."""
    run, data, live = setup.run, setup.data, setup.live
    with run.ranks.together():
        objective = live.objective or preference_objective(config.preference, run)
    model = build_model(run, live, partial(_look_at_rows, config, setup))
    with run.ranks.together():
        images = _images(config, model.blueprint)
        layout = pair_layout(config, model, images)
        plain = preference_tokeniser(config, run, model.blueprint.tokenizer, images)
        accept = row_filter(run)
    tokenise: Tokenise[Example] = plain
    reference: Reference | None = None
    if config.preference.needs_reference and config.reference.precompute:
        tokenise = with_table(TableInputs(config, model, data, live, layout, plain, accept))
        layout = replace(layout, columns={**layout.columns, LOGPROB_COLUMN: np.float64})
    elif config.preference.needs_reference:
        why = f"preference.loss: {', '.join(config.preference.kinds)}"
        reference = build_reference(model, live, config.reference, why=why)
    reading = SetReading(dict.fromkeys(data.evaluation, tokenise), accept, preferred_only(plain))
    sets = opened_sets(run, data, reading, layout)
    with run.ranks.together():
        refuse_completions_with_images(config, sets, images)
    evaluation = PreferenceEvaluation(
        model=model,
        objective=objective,
        sets=sets,
        takes_pairs=config.preference.takes_pairs,
        layout=layout,
        reference=reference,
    )
    return evaluation, tokenise


def _look_at_rows(config: DPOConfig, setup: RunSetup, origin: Blueprint) -> None:
    with setup.run.ranks.together():
        tokenise = preference_tokeniser(config, setup.run, origin.tokenizer, _images(config, origin))
    check_first_rows(setup.run, setup.data, tokenise, sees=origin.image_processor is not None)


def _images(config: DPOConfig, origin: Blueprint) -> ImageSide | str:
    """Return what turns images into tokens; or why no row may have some."""
    if isinstance(config.reference, ServerReferenceConfig) and config.preference.needs_reference:
        return NO_IMAGES
    return image_side_of(config, origin)


def pair_layout(config: DPOConfig, model: Model, images: ImageSide | str) -> Layout:
    """Return how pairs, or single answers, are packed.

    Raises:
        ConfigError: Prompts shall be shared, and cannot.
    """
    pairs, padded = config.preference.takes_pairs, model.module.padded
    if config.data.shared_prompt == "on" and padded:
        reason = model.blueprint.family.why_not_packed or "data.packing or model.attention says so"
        raise ConfigError(
            f"data.shared_prompt: on, but {model.blueprint.family.name} is trained with one sequence per row "
            f"({reason}): a prompt stands in each. Use auto."
        )
    return replace(
        layout_of(model, images),
        whole_draws=pairs,
        shares_heads=pairs and not padded and config.data.shared_prompt != "off",
        columns={} if pairs else {"desirable": np.bool_},
    )
