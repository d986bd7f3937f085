"""Which models our own decoding completes texts of as they would themselves.

Recurrent layers carry a state from token to token, which transformers keeps in its caches; ours has it too, row by row.
A model that keeps something elsewhere would be sampled wrongly, so a small model of the same architecture is tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError

from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import ModelError
from holdfast.models.check.shrink import drawn_model, shrink
from holdfast.models.files.configuration import on_meta
from holdfast.models.files.vision import set_attention
from holdfast.models.layers.attention import upstream_attention
from holdfast.models.names import named_parameters
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.rollout.engine import Request, Sampled, generate
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.sampling import Stops

_LARGEST = 100_000_000
"""Parameters of a small model that is tried."""
_LENGTHS = (1, 3, 18)
"""Tokens of the prompts: a single one, fewer than a convolution sees, and more than a block has."""
_NEW_TOKENS = 6
_VERDICTS: dict[str, str] = {}
"""Class and configuration of a model -> why it is not decoded here."""
_TOLERANCE = 1e-4
"""How far log-probabilities may lie apart; computed in float64, but for states that models keep in float32."""


def why_not_in_process(origin: Blueprint, *, padded: bool) -> str:
    """Return why our own decoding cannot sample from a model; "" if it can.

    Args:
        origin: The model.
        padded: Its batches hold one document per row.
    """
    if origin.family.recurrent:
        return why_not_decoded(origin)
    if origin.packed and not padded:
        return ""
    return origin.family.why_not_packed or "it is padded, as data.packing or model.attention says"


def why_not_decoded(origin: Blueprint) -> str:
    """Return why our own decoding would not complete texts as the model does; "" if it was seen to.

    Args:
        origin: A model with recurrent layers.
    """
    if origin.image_processor is not None:
        return f"{origin.family.why_not_packed}, and it sees images"
    key = _key(origin)
    if key not in _VERDICTS:
        _VERDICTS[key] = _why_not(type(origin.skeleton), origin.skeleton.config)
    return _VERDICTS[key]


def agree_on_decoding(origin: Blueprint, gather: Callable[[str], Sequence[str]]) -> None:
    """Let no rank decode a model that one of them could not; all of them call this together.

    Args:
        origin: A model.
        gather: Brings what every rank says to all.
    """
    if origin.family.recurrent:
        _VERDICTS[_key(origin)] = next(filter(None, gather(why_not_decoded(origin))), "")


def _key(origin: Blueprint) -> str:
    return f"{type(origin.skeleton)} {json.dumps(origin.skeleton.config.to_dict(), sort_keys=True, default=str)}"


def _why_not(kind: Any, config: Any) -> str:
    """Try a small model of a class and a configuration."""
    make = kind._from_config  # noqa: SLF001 - no public form takes a class
    try:
        small = shrink(config, lambda candidate: on_meta(make, candidate))
        count = sum(value.numel() for value in on_meta(make, small).parameters())
        if count > _LARGEST:
            return f"a small model of it has {count:,} parameters, too many to try our own decoding on"
        gap = _gap(drawn_model(make, small).double())
    except torch.OutOfMemoryError:
        raise
    except ModelError as error:
        return f"{error}, and so our own decoding cannot be tried"
    except (
        *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError),
        *(RuntimeError, StopIteration, StrictDataclassError, TypeError, ValueError),
    ) as error:
        return f"our own decoding fails on it ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    if gap <= _TOLERANCE:
        return ""
    return f"our own decoding would give it log-probabilities that are {gap:.1e} away"


def _gap(model: Any) -> float:
    """Return how far the log-probabilities of drawn tokens lie from those of the model over whole texts."""
    set_attention(model, upstream_attention(model))
    model.set_experts_implementation("eager")
    origin = blueprint(ModelConfig(path="given", tokenizer="builtin:characters"), Path(), seed=0, live=model)
    engine = InProcessEngine(origin, torch.device("cpu"), torch.float64, Stops(frozenset()))
    engine.update_weights(named_parameters(model).items(), 0)
    generator, tokens = np.random.default_rng(0), model.config.get_text_config().vocab_size // 2
    asked = [Request(number, generator.integers(2, tokens, size), (1, 2)) for number, size in enumerate(_LENGTHS)]
    found = generate(engine, asked, SamplingConfig(max_new_tokens=_NEW_TOKENS))
    return max(_distance(model, asked[sampled.request_id].prompt, sampled) for sampled in found)


@torch.no_grad()
def _distance(model: Any, prompt: Any, sampled: Sampled) -> float:
    tokens = torch.from_numpy(np.concatenate([prompt, sampled.tokens]))[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].double()
    expected = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0]
    return float((torch.from_numpy(sampled.logprobs).double() - expected).abs().max())
