"""The form of the head's arithmetic: Triton kernels on a GPU, where they agree with torch's operations."""

from __future__ import annotations

import torch

from holdfast.config.sections.algorithm import NLLConfig
from holdfast.config.verbs.distill import DistillConfig, TeacherConfig
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.data.batches.packing import pack, to_device
from holdfast.data.batches.weights import Share
from holdfast.data.tokens.vision import ImageSide
from holdfast.models.check.forward import documents
from holdfast.models.check.head_forms import compare_forms
from holdfast.models.heads.form import described, form_record, leave_kernels, take_kernels
from holdfast.models.heads.policy import PolicyModel
from holdfast.parallel.plan import ShardPlan
from holdfast.training.run import Setting, ShardedModel


def choose_head_form(setting: Setting, policy: PolicyModel, plan: ShardPlan) -> str:
    """Let Triton kernels sweep the logits where every rank can run them; all ranks call this together.

    Returns:
        Why they cannot, "" if they can, or where there is no GPU.
    """
    if setting.world.device.type != "cuda" or setting.config.scores or policy.readable_head() is None:
        return ""
    if reason := why_unused(setting.config):
        return reason
    simulated = setting.without_numbers is not None
    dtype = getattr(torch, plan.compute_dtype)
    return _agreed(setting, policy, take_kernels(policy, dtype, setting.world.device, simulated=simulated))


def why_unused(config: TrainingConfig) -> str:
    """Return why a run's training never calls the kernels; "" where it does."""
    match config:
        case SFTConfig(objective=NLLConfig(label_smoothing=share)) if share:
            return "objective.label_smoothing reads the logits of all tokens"
        case DistillConfig(teacher=TeacherConfig()) if config.distill.loss.kind != "sampled_reverse_kl":
            return "the divergence reads the logits of the teacher too"
        case _:
            return ""


def check_head_form(sharded: ShardedModel, images: ImageSide | None, reason: str) -> str:
    """Compare the kernels, where they were chosen, with torch's operations; all ranks call this together.

    Kernels that differ or fail are left, and the run goes on.

    Args:
        sharded: Checked against transformers.
        images: What makes tokens of images.
        reason: Why the kernels were not chosen.

    Returns:
        What to print of the form, "" where there was no choice.
    """
    policy, setting = sharded.model, sharded.setting
    agreement = ""
    if policy.head_spec.kernel_tokens is not None:
        first, _, second = documents(policy, images)
        batch = pack([first, second], [Share(1.0, 1.0)] * 2, padded=policy.padded)
        reason, difference = compare_forms(policy, to_device(batch, setting.world.device))
        reason = _agreed(setting, policy, reason)
        agreement = "" if reason else f"; they agree with torch's operations to {difference:.0e}"
    record = form_record(policy, setting.world.device)
    if record is None or setting.world.device.type != "cuda":
        return ""
    note = f" (Triton kernels are not used: {reason})" if reason else agreement
    return f"head: {described(record)}{note}"


def _agreed(setting: Setting, policy: PolicyModel, reason: str) -> str:
    """Leave the kernels on all ranks if one of them has a reason to; return the first one's."""
    reason = next(filter(None, setting.ranks.gather(reason)), "")
    if reason:
        leave_kernels(policy)
    return reason
