"""Compiled blocks stay compiled where the check before step 1 finds transformers' numbers with them, in less time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import HoldfastError
from holdfast.models.check.forward import plain_tokens
from holdfast.models.check.head_forms import LIMITS
from holdfast.models.layers.family import positions_of
from holdfast.parallel.compiler import BlockCompiler
from holdfast.parallel.forms import TIMED_TOKENS, Candidate, Times, timed_rounds
from holdfast.text.escaping import error_words
from holdfast.training.run import Model
from holdfast.training.setup.gradient_check import form_gradients, restoring_gradients
from holdfast.types import Example

_ROOM = 4
"""How many times the memory that passes by compiled blocks took is free where uncompiled ones are tried."""


def check_compiled(
    model: Model, compiler: BlockCompiler, check: Callable[[], list[str]], images: ImageSide | None
) -> list[str]:
    """Check a model; where its blocks fail the check, do not compile or gain nothing, check it again uncompiled.

    All ranks call this together. A graph that fails to compile later runs uncompiled on its rank, which is printed.
    An error of one rank alone, such as for want of memory, is raised as it is: the others wait within a pass.

    Args:
        model: The model.
        compiler: Of its blocks.
        check: Compares it with transformers', and returns what to print.
        images: What makes tokens of images.

    Returns:
        What to print.

    Raises:
        ModelError: The model fails the check without compiled blocks too; the same on all ranks.
    """
    run, forms = model.run, model.forms
    if not model.plan.compile_blocks:
        reason = run.config.left_uncompiled(run.world.device.type)
        return [*check(), *([str(forms.note("blocks", 0, reason))] if reason else [])]
    before, all_raise = _seconds_of_compiling(), run.whether_all_raise()
    is_asked = run.config.parallel.compile == "blocks"
    is_timed = forms.times and not is_asked
    lines: list[str] = []
    passes = _Passes(model, compiler, images) if is_timed else None

    def compare() -> str:
        failed = ""
        try:
            lines[:] = check()
            failed = passes.difference() if passes is not None else ""
        except Exception as error:  # compiled code raises errors of many kinds; the second check tells which
            if not (isinstance(error, HoldfastError) or all_raise()):
                raise
            failed = error_words(error)
        reason = next(iter(compiler.reasons), failed)
        return reason and f"the check before step 1 failed with them ({reason})"

    rounds = passes.rounds if passes is not None else None
    seconds = lambda: f" in {_seconds_of_compiling() - before:.1f} s"  # noqa: E731 - a clause of the line
    standing = forms.choose(Candidate("blocks", compiler.use, compare, rounds, is_asked=is_asked, detail=seconds))
    if not standing.value:
        lines = check()
    # Also where they are not compiled: a run that began with compiled blocks goes on with them.
    compiler.tell = partial(forms.lose, "blocks")
    if run.world.is_first:
        compiler.begins = partial(_say_once, compiler)
    return [*lines, str(standing)]


class _Passes:
    """Forward and backward passes over a micro-batch of the run's size, with compiled blocks and without."""

    def __init__(self, model: Model, compiler: BlockCompiler, images: ImageSide | None) -> None:
        self._model, self._compiler = model, compiler
        data, positions = model.run.config.data, positions_of(model.blueprint.skeleton)
        most = min(data.tokens_per_micro_batch, TIMED_TOKENS)
        length = min(data.max_length, most, most if positions is None else positions.count)
        self._examples = []
        for index in range(max(1, most // length)):
            tokens = plain_tokens(model.module, images, length, index)
            self._examples.append(Example(index, index, tokens, np.arange(length) > 0))

        self._has_room = True

    def difference(self) -> str:
        """Say how losses differ that compiled blocks and uncompiled ones give; "" if they do not.

        All ranks call this together. Where some rank may have no memory for uncompiled blocks, they are not run.
        """
        ours = self._run(1)
        self._has_room = all(self._model.run.ranks.gather(self._memory_is_enough()))
        if not self._has_room:
            return ""
        plain = self._run(0)
        self._compiler.use(1)
        gap = abs(ours - plain) / max(abs(plain), 1e-30)
        limit = LIMITS.get(getattr(torch, self._model.plan.compute_dtype), LIMITS[torch.float32])
        return "" if gap <= limit else f"losses of a micro-batch differ by {gap:.1e} of their size"

    def rounds(self) -> list[Times]:
        """Time both ways; [] where there may be no memory for one. All ranks call this together."""
        device = self._model.run.world.device
        return timed_rounds(lambda: self._run(1), lambda: self._run(0), device) if self._has_room else []

    def _memory_is_enough(self) -> bool:
        device = self._model.run.world.device
        if device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        taken = torch.cuda.max_memory_allocated(device) - allocated
        return free + torch.cuda.memory_reserved(device) - allocated > _ROOM * taken

    def _run(self, value: int) -> float:
        self._compiler.use(value)
        policy, device = self._model.module, self._model.run.world.device
        with restoring_gradients(policy, device):
            dropout = self._model.run.config.model.dropout
            return form_gradients(policy, device, self._model.plan, self._examples, dropout=dropout)


def _say_once(compiler: BlockCompiler) -> None:
    """Say that a step waits for a compilation: rows of the check have one length, and lengths differ from step 1 on."""
    print("blocks: compiled once more, for rows of any length; this step waits for it", flush=True)
    compiler.begins = None


def _seconds_of_compiling() -> float:
    return float(torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0))
