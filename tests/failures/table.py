"""The failures by number: five that runs were lost to, and fifteen beside them."""

from __future__ import annotations

from functools import partial

from tests.failures import (
    building,
    exporting,
    gradients,
    optimizer_resume,
    optimizer_state,
    recomputation,
    reference_model,
    rescue,
    saving,
)
from tests.failures.lab import Failure

FAILURES = (
    Failure(
        "1",
        "an optimizer that holds frozen parameters cannot be saved",
        optimizer_state.naive_frozen,
        optimizer_state.ours_frozen,
        "NCCL, whose message about the same mismatch is another",
        rescue.frozen_tower,
    ),
    Failure(
        "2",
        "an option of another type than numbers and texts cannot be saved",
        optimizer_state.naive_values,
        optimizer_state.ours_values,
        rescued=rescue.dtype_in_a_group,
    ),
    Failure(
        "3",
        "activation checkpointing fills a key-value cache twice",
        recomputation.naive,
        recomputation.ours,
        rescued=rescue.recomputation,
    ),
    Failure(
        "4",
        "a whole run is resumed from a checkpoint of weights alone",
        rescue.naive_weights,
        saving.ours_weights,
        ""
        if rescue.HAS_LIGHTNING
        else "Lightning's strategies, which are not installed: the lines of DCP that they come down to stand for them",
        rescue.weights_alone,
    ),
    Failure(
        "5",
        "the reference policy is not placed like the policy",
        reference_model.naive_reference,
        reference_model.ours_reference,
        "memory of a GPU: shares of parameters are counted",
        rescue.reference,
    ),
    Failure(
        "6.1",
        "ranks use different parameters of one FSDP2 unit",
        gradients.naive_experts,
        gradients.ours_experts,
    ),
    Failure("6.2", "only some ranks have an image", gradients.naive_images, gradients.ours_images),
    Failure(
        "6.3",
        "optimizer state is loaded while gradients are live",
        partial(optimizer_resume.live_gradients, ours=False),
        partial(optimizer_resume.live_gradients, ours=True),
    ),
    Failure("6.4", "a loss is averaged per micro-batch or per rank", gradients.naive_average, gradients.ours_average),
    Failure("6.5", "buffers that no file holds are garbage after meta", building.naive_buffers, building.ours_buffers),
    Failure("6.6", "tied weights are sharded, stored and loaded as two", building.naive_ties, building.ours_ties),
    Failure(
        "6.7",
        "parameters are used while a forward pass has left them gathered",
        reference_model.naive_gathered,
        reference_model.ours_gathered,
    ),
    Failure(
        "6.8",
        "a parameter that never had a gradient makes a checkpoint that cannot be resumed",
        optimizer_resume.naive_absent,
        optimizer_resume.ours_absent,
    ),
    Failure(
        "6.9", "param groups are others at the resume", optimizer_resume.naive_groups, optimizer_resume.ours_groups
    ),
    Failure("6.10", "bfloat16 weights do not move", optimizer_resume.naive_bfloat16, optimizer_resume.ours_bfloat16),
    Failure("6.11", "a loss is not finite on one rank", gradients.naive_nan, gradients.ours_nan),
    Failure(
        "6.12",
        "gradients in host memory are clipped over a backend for GPUs",
        gradients.naive_norm,
        gradients.ours_norm,
        "NCCL itself: a gloo group that serves CUDA alone stands for it, and ours ran on gloo",
    ),
    Failure(
        "6.13",
        "weights change while a save in the background reads them",
        saving.naive_background,
        saving.ours_background,
    ),
    Failure("6.14", "a checkpoint is read by another number of ranks", saving.naive_ranks, saving.ours_ranks),
    Failure(
        "6.15",
        "state is saved and handed on from wherever it happens to be",
        exporting.naive_handed_on,
        exporting.ours_handed_on,
        "weights on a GPU that are offloaded in between",
    ),
)
BY_NUMBER = {failure.number: failure for failure in FAILURES}
