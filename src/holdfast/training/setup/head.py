"""The form of the head's arithmetic: Triton kernels on a GPU, if they agree with torch's operations and are faster."""

from __future__ import annotations

from functools import partial

import torch

from holdfast.config.sections.algorithm import NLLConfig
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.data.batches.packing import Share, pack, to_device
from holdfast.data.tokens.vision import ImageSide
from holdfast.models.check.forward import documents
from holdfast.models.check.head_forms import HeadComparison, compare_forms
from holdfast.models.heads.form import take_kernels, use_kernels, why_no_kernels_for
from holdfast.models.heads.policy import PolicyModel
from holdfast.parallel.forms import TIMED_TOKENS, Candidate, timed_rounds
from holdfast.parallel.plan import ShardPlan
from holdfast.training.run import Model, Run


def choose_head_form(run: Run, policy: PolicyModel, plan: ShardPlan) -> str:
    """Let Triton kernels sweep the logits where every rank can run them; all ranks call this together.

    Returns:
        Why they cannot, "" if they can, or where there is no GPU.
    """
    if not has_choice(run, policy):
        return ""
    if reason := why_unused(run.config):
        return reason
    dtype = getattr(torch, plan.compute_dtype)
    reason = next(filter(None, run.ranks.gather(why_no_kernels_for(policy, dtype, run.world.device))), "")
    if not reason:
        take_kernels(policy, dtype, run.world.device)
    return reason


def has_choice(run: Run, policy: PolicyModel) -> bool:
    """Return whether a policy has a head that kernels could sweep, on a GPU."""
    return run.world.device.type == "cuda" and not run.config.scores and policy.readable_head() is not None


def why_unused(config: TrainingConfig) -> str:
    """Return why a run's training never calls the kernels; "" where it does."""
    match config:
        case SFTConfig(objective=NLLConfig(label_smoothing=share)) if share:
            return "objective.label_smoothing reads the logits of all tokens"
        case DistillConfig(has_server=False) if config.distill.loss.kind != "sampled_reverse_kl":
            return "the divergence reads the logits of the teacher too"
        case _:
            return ""


def check_head_form(model: Model, images: ImageSide | None, reason: str) -> str:
    """Compare the kernels, where they were chosen, with torch's operations; all ranks call this together.

    Kernels that differ, fail or are slower are left, and the run goes on.

    Args:
        model: Checked against transformers.
        images: What makes tokens of images.
        reason: Why the kernels were not chosen.

    Returns:
        What to print of the form, "" where there was no choice.
    """
    policy, run, forms = model.module, model.run, model.forms
    tokens = policy.head_spec.kernel_tokens
    if tokens is None:
        return f"{forms.note('head', 0, reason)}" if reason else ""
    found = HeadComparison("", 0.0)

    def compare() -> str:
        nonlocal found
        first, _, second = documents(policy, images)
        batch = pack([first, second], [Share(1.0, 1.0)] * 2, padded=policy.padded)
        time = partial(timed_rounds, device=run.world.device) if forms.times else None
        timed_tokens = min(run.config.data.tokens_per_micro_batch, TIMED_TOKENS)
        found = compare_forms(policy, to_device(batch, run.world.device), timed_tokens, time)
        return found.reason

    def detail() -> str:
        return f", {tokens:,} tokens at a time; they agree with torch's operations to {found.difference:.0e}"

    use = partial(use_kernels, policy)
    return str(forms.choose(Candidate("head", use, compare, lambda: found.times, tokens, detail=detail)))
