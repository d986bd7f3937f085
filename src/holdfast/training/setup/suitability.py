"""Make the checks before step 1 without a run (`holdfast model check`): attention, decoding, adapters, refusals.

A small model whose weights are available is checked directly. Any other model is checked by a small configuration of
the same architecture with random weights (`models/check/shrink.py`), and by its own shapes on the meta device.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from holdfast.config.sections.model import LoRAConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ModelError, UserError
from holdfast.models.adapters.live import adapters_of
from holdfast.models.adapters.lora import add_adapters
from holdfast.models.check.boundaries import boundaries_of
from holdfast.models.check.shrink import CannotShrink, drawn_model, layers_in, shrink
from holdfast.models.check.tower import count_features
from holdfast.models.files.configuration import maker, on_meta, refusals
from holdfast.models.files.origin import load_tokenizer, locate
from holdfast.models.files.processors import processor_settings
from holdfast.models.files.vision import image_side
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.attention import register_attention
from holdfast.models.layers.family import family_of
from holdfast.models.layers.rotary import rotary_boundaries
from holdfast.models.setup.model import Blueprint, blueprint, configured
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.rollout.local.recurrent import why_not_in_process
from holdfast.training.run import Run
from holdfast.training.setup.model import build_policy, check_positions

_SMALL = 30_000_000
"""Parameters of a model that is looked at as it is, if its weights are here."""
_LARGEST = 400_000_000
"""Parameters of a shrunken model that are still drawn and computed with."""


def check_suitability(
    config: TrainingConfig, base: Path, world: World, *, has_config: bool, say: Callable[[str], None]
) -> bool:
    """Look at a run's model, and say whether nothing is refused. What cannot be looked at is named and not refused.

    Args:
        config: The run's.
        base: The directory of its file.
        world: This process alone.
        has_config: Whether somebody wrote the configuration, so that its own keys are to hold too.
        say: Takes each line as soon as it is true.

    Raises:
        ModelError: There are no such files.
    """
    register_attention()
    run = Run(config=config, base=base, world=world, ranks=RankGroup())
    raw_config, _ = configured(config.model, base)
    make = maker(raw_config, config.model.trust_remote_code, config.scores)
    try:
        with refusals(f"transformers cannot build a {raw_config.model_type} model from its configuration"):
            model = on_meta(make, raw_config)
        for line in _shape_lines(run, model, has_config=has_config):
            say(line)
        for line in _check_lines(run, model):
            say(line)
    except CannotShrink as error:
        say(f"not looked at: {error}; a run checks the model itself before step 1")
        say("nothing is refused of what was looked at")
        return True
    except UserError as error:
        say(f"refused: {' '.join(str(error).split())}")
        return False
    say("nothing is refused")
    return True


def _shape_lines(run: Run, model: Any, *, has_config: bool) -> Iterator[str]:
    """Yield what the shapes and fields of a whole model on the meta device say; adapters are laid into it."""
    yield f"model: {type(model).__name__} ({family_of(model).name}), {_size(model):,} parameters"
    yield from _on_lengths(model.config)
    yield f"lora: {_layers_to_adapt(model, run.config.model.lora or LoRAConfig())}"
    if has_config:
        origin = _on_meta_alone(run, model)
        note = check_positions(run.config, origin)
        if note:
            yield note


def _on_meta_alone(run: Run, model: Any) -> Blueprint:
    """Return the plan of the run's whole model, without its weights: patterns and names are matched with it."""
    config = run.config
    section, lora = config.model, config.model.lora
    if lora is not None and lora.path is not None:
        section = section.model_copy(update={"lora": lora.model_copy(update={"path": None, "any_base": False})})
    return blueprint(section, run.base, seed=config.seed, live=model, scorer=config.scores)


def _on_lengths(raw_config: Any) -> Iterator[str]:
    every, rotary = boundaries_of(raw_config), rotary_boundaries(raw_config)
    if not every:
        yield "lengths: computed alike at every length"
        return
    yield f"lengths: computed otherwise beyond {', '.join(f'{length:,}' for length in every)} tokens"
    if rotary:
        yield (
            f"lengths: rotary angles change there at {', '.join(f'{length:,}' for length in rotary)}; a policy whose "
            "prompt and completion may cross that is refused"
        )


def _layers_to_adapt(model: Any, section: LoRAConfig) -> str:
    try:
        note = add_adapters(model, section.model_copy(update={"quantize": None}))
    except ModelError as error:
        return f"refused: {error}"
    names = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in adapters_of(model))
    return f"{', '.join(names)} ({note.removeprefix('lora: ')})"


def _size(model: nn.Module) -> int:
    return sum(value.numel() for name, value in model.named_parameters() if ".lora_" not in name)


def _check_lines(run: Run, model: Any) -> Iterator[str]:
    """Yield what the check before step 1 finds, of the model itself or of a small one like it."""
    config, origin, subject = _model_to_check(run, model)
    yield f"looked at: {subject}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        policy = build_policy(replace(run, config=config), origin).module
    why = [line for line in (*origin.notes, *printed.getvalue().splitlines()) if line.startswith("attention: ")]
    if policy.padded:
        yield next(iter(why), "attention: one document per row, since data.packing or model.attention says so")
    else:
        yield "attention: packed, documents side by side without seeing each other"
    why_not = why_not_in_process(origin, padded=policy.padded)
    yield (
        f"rollouts: by transformers' generate, since {why_not}"
        if why_not
        else "rollouts: decoded in this process, over the training weights"
    )
    yield from (f"images: {line}" for line in _on_images(run, policy, whole=origin.directory is not None))
    yield from (line for line in printed.getvalue().splitlines() if line.startswith(("forward check", "checked")))


def _on_images(run: Run, policy: PolicyModel, *, whole: bool) -> Iterator[str]:
    """Yield what the model's own processor was found to make of images, and how that was proved.

    Args:
        run: Names the model.
        policy: The model that is looked at.
        whole: Whether it is the model itself, whose check counts features too.
    """
    side = _image_side(run)
    if isinstance(side, str):
        yield side
        return
    yield from side.described()
    if not whole:
        tokens, features = count_features(policy, side)
        listing = ", ".join(map(str, tokens))
        if tokens == features:
            yield f"a small tower makes as many features as there are tokens ({listing})"
        else:
            raise ModelError(
                f"The processor of {side.name} writes {listing} tokens for images of several sizes, and a small vision "
                f"tower like the model's makes {', '.join(map(str, features))} features of them. The model's "
                "preprocessor_config.json and config.json do not belong together."
            )


def _image_side(run: Run) -> ImageSide | str:
    section, base = run.config.model, run.base
    raw_config, processor = configured(section, base)
    directory = None if section.path is None else locate(section.path, section, base, weights=False)
    if processor is None:
        return image_side(None, None, raw_config)
    try:
        tokenizer = load_tokenizer(section, base)
    except ModelError as error:
        return f"not looked at: {error}"
    settings = processor_settings([] if directory is None else [directory])
    return image_side(processor, tokenizer, raw_config, settings=settings)


def _model_to_check(run: Run, full_model: Any) -> tuple[TrainingConfig, Blueprint, str]:
    """Return the model to build: the model itself if it is small and has weights, else a small one like it."""
    config, base = run.config, run.base
    model, scorer, raw_config = config.model, config.scores, full_model.config
    make = maker(raw_config, model.trust_remote_code, scorer)
    directory = None if model.path is None else _with_weights(Path(model.path).expanduser(), run)
    parallel = config.parallel.model_copy(update={"compute_dtype": "float32"})
    if _size(full_model) <= _SMALL and (directory is not None or model.path is None):
        section = model.model_copy(update={"dtype": "float32", "frozen_dtype": "same"})
        config = config.model_copy(update={"model": section, "parallel": parallel})
        return config, blueprint(section, base, seed=config.seed, scorer=scorer), "the model itself, in float32"
    small = shrink(raw_config, lambda candidate: on_meta(make, candidate))
    count = _size(on_meta(make, small))
    if count > _LARGEST:
        raise CannotShrink(
            f"{raw_config.model_type} has {count:,} parameters where it is smallest, too many to look at"
        )
    live = drawn_model(make, small)
    # Patterns of a run may name layers that are left out here; the whole model was matched with them.
    whole_section: dict[str, Any] = {
        "lora": None,
        "freeze": [],
        "dtype": "float32",
        "frozen_dtype": "same",
    }
    section = model.model_copy(update=whole_section)
    config = config.model_copy(update={"model": section, "parallel": parallel})
    origin = blueprint(section, base, seed=config.seed, live=live, tokenizer=character_tokenizer(), scorer=scorer)
    layers = f"{layers_in(live)} of {layers_in(full_model)} layers"
    return config, origin, f"a small model of the same architecture, {layers}, {count:,} random parameters in float32"


def _with_weights(name: Path, run: Run) -> Path | None:
    """Return the directory, if there is one with weights."""
    return next((path for path in (name, run.base / name) if any(path.glob("*.safetensors"))), None)
