"""Places models on devices that compute nothing: their tensors have shapes, and no numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from holdfast.models.heads.form import take_kernels
from holdfast.models.layers.rotary import keep_short_angles
from holdfast.models.setup.model import Blueprint
from holdfast.parallel.apply import apply_plan
from holdfast.parallel.shards import place_empty
from holdfast.training.run import Model, Run
from holdfast.training.setup.head import has_choice, why_unused
from holdfast.training.setup.model import plan_model

COMPILER = "aot_eager_decomp_partition"
"""The compiler of blocks: it chooses the tensors that are saved for the backward pass as inductor does, which itself
fails on tensors without numbers, and runs the operations one by one."""

WithoutNumbers = Callable[[], AbstractContextManager[None]]
"""Returns a context in which tensors are created without numbers."""


def place_shapes(without_numbers: WithoutNumbers, run: Run, origin: Blueprint, *, trained: bool = True) -> Model:
    """Plan and shard a model as `build_policy` does, without reading a weight or checking one.

    Raises:
        UserError: The plan cannot work.
    """
    unplaced = plan_model(run, origin, trained=trained)
    model = unplaced.model
    if has_choice(run, model.module) and not why_unused(run.config):
        # Nothing is known of the machine that is planned for: kernels count as installed.
        take_kernels(model.module, getattr(torch, model.plan.compute_dtype), run.world.device)
    keep_short_angles(model.module.language_model)  # to choose others, a length is read from positions
    with without_numbers():
        apply_plan(model.module, model.plan, unplaced.mesh, partial(nn.Module.compile, backend=COMPILER))
        place_empty(model.module, origin.buffers, run.world.device, offload=model.plan.cpu_offload)
    return model
