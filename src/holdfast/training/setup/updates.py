"""The form of the updates of `adamw_8bit`: compiled on a GPU, if that gives the plain form's numbers and is faster."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from holdfast.config.sections.optim import AdamW8bitConfig
from holdfast.optim.lowbit import AdamW8bit, StandIn, Update, numbers_of, update_shard
from holdfast.parallel.apply import compiled
from holdfast.parallel.forms import ROUNDS, Candidate, Forms, Times, timed_rounds
from holdfast.text.escaping import error_words
from holdfast.training.run import Model

_LIMIT = 1e-5
"""Largest difference between numbers of both forms, as a share of the largest number."""
_AT_EDGES = 0.002
"""Share of a moment's numbers that may differ more: one between two of its table may be rounded to either."""


def settle_update_form(model: Model) -> None:
    """Choose the form of a model's updates, and print it where there was a choice; all ranks call this together."""
    run, optimizer = model.run, model.optimizer
    config = run.config.optim
    if not (isinstance(config, AdamW8bitConfig) and isinstance(optimizer, AdamW8bit)):
        return
    is_tried = model.forms.times and not model.plan.cpu_offload if config.compile is None else config.compile
    if is_tried:
        line = choose_update(model.forms, optimizer, compiled(update_shard), config)
        if run.world.is_first:
            print(line, flush=True)


def choose_update(forms: Forms, optimizer: AdamW8bit, form: Update, config: AdamW8bitConfig) -> str:
    """Use a form of the updates if it agrees with the plain one and is faster; return what to print of it."""

    def use(value: int) -> None:
        optimizer.form = form if value else update_shard

    compare, rounds = partial(difference, optimizer, form), partial(_rounds, optimizer, form)
    return str(forms.choose(Candidate("updates", use, compare, rounds, is_asked=config.compile is True)))


def difference(optimizer: AdamW8bit, form: Update) -> str:
    """Say how a form of an optimizer's updates differs from the plain one on shards of this rank's shapes.

    Returns:
        Why the form cannot be used, "" if it gives the plain form's numbers.
    """
    try:
        with warnings.catch_warnings():
            # It is about torch's cache of compiled code; torch compiles without it.
            warnings.filterwarnings("ignore", message=".*_stable_hash_for_caching")
            return next(filter(None, (_difference(make, form) for make, _ in optimizer.stand_ins())), "")
    except Exception as error:  # noqa: BLE001 - a compiler raises errors of many kinds
        return f"they fail ({error_words(error):.400})"


def _difference(make: Callable[[], StandIn], form: Update) -> str:
    ours, plain = make()(form), make()(update_shard)
    allowed = {"weights": 0.0, "first moments": _AT_EDGES, "second moments": _AT_EDGES}
    shares = [_differing(left, right) for left, right in zip(ours, plain, strict=True)]
    return next(
        (
            f"{share:.1%} of the {name} of {list(plain[0].shape)} differ with them"
            for share, (name, limit) in zip(shares, allowed.items(), strict=True)
            if share > limit
        ),
        "",
    )


def _differing(ours: Tensor, plain: Tensor) -> float:
    left, right = (numbers_of(each, torch.float64) for each in (ours, plain))
    return float(((left - right).abs() > _LIMIT * right.abs().max()).double().mean())


def _rounds(optimizer: AdamW8bit, form: Update) -> list[Times]:
    totals = [(0.0, 0.0)] * ROUNDS
    for make, count in optimizer.stand_ins():
        stand_in = make()
        device = stand_in(update_shard)[0].device
        times = timed_rounds(partial(stand_in, form), partial(stand_in, update_shard), device)
        totals = [(ours + count * a, plain + count * b) for (ours, plain), (a, b) in zip(totals, times, strict=True)]
    return totals
