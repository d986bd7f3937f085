"""The titles, units and order of metrics on a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Label(NamedTuple):
    """A chart's title, and the title of its vertical axis."""

    title: str
    unit: str


_LABELS = {
    "reward": Label("Reward", "mean of a step's completions"),
    "rewards/margins": Label("Margin of the rewards", "chosen minus rejected"),
    "rewards/accuracies": Label("Pairs in the right order", "share"),
    "loss": Label("Loss", "of the objective"),
    "divergence": Label("Divergence from the teacher", "nats per token"),
    "mean_token_accuracy": Label("Tokens predicted right", "share"),
    "accuracy": Label("Accuracy", "share solved"),
    "kl": Label("KL to the reference", "nats per token"),
    "entropy": Label("Entropy of the policy", "nats per token"),
    "entropy_estimate": Label("Entropy, estimated from samples", "nats per token"),
    "completions/mean_length": Label("Length of completions", "tokens"),
    "completions/clipped_ratio": Label("Completions cut at their longest", "share"),
    "frac_reward_zero_std": Label("Groups whose rewards are all alike", "share"),
    "grad_norm": Label("Gradient norm", "before clipping"),
    "learning_rate": Label("Learning rate", "per update"),
    "throughput/tokens_per_second": Label("Throughput", "tokens per second"),
    "throughput/mfu": Label("Use of the hardware's peak", "share"),
    "memory/peak_gib": Label("Peak memory of rank 0's device", "GiB"),
    "memory/resident_gib": Label("Memory of rank 0", "GiB"),
    "step_time": Label("Time per step", "seconds"),
}
"""In the order in which they are shown."""
_SUPERVISED_LOSS = Label("Loss", "nats per token")
TIMING = "timing/"
EVALUATING = "timing/evaluation"
"""No part of a step's time."""
EVALUATION = "eval/"
MOST_CHARTS = 12
"""Charts that stand on the page; every other metric can be chosen in one more."""


def metric_label(name: str, verb: str = "") -> Label:
    """Return what a metric is called."""
    if name == "loss" and verb in {"sft", "distill"}:
        return _SUPERVISED_LOSS
    if name in _LABELS:
        return _LABELS[name]
    if name.startswith(TIMING):
        return Label(f"Time in {name.removeprefix(TIMING)}", "seconds")
    return Label(name, "value")


def evaluations_of(name: str, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (evaluation set, metric) of each evaluation that measures what a metric of training measures."""
    split_names = (
        (evaluation, evaluation.removeprefix(EVALUATION).partition("/"))
        for evaluation in names
        if evaluation.startswith(EVALUATION)
    )
    return [(of_set, evaluation) for evaluation, (of_set, _, metric) in split_names if metric == name]


def leading(names: Iterable[str]) -> list[str]:
    """Return the metrics that get a chart, the most telling first; an evaluation alone stands under its own name."""
    available = list(names)
    measured = {
        evaluation.removeprefix(EVALUATION).partition("/")[2]
        for evaluation in available
        if evaluation.startswith(EVALUATION)
    }
    hidden = {"entropy_estimate"} if "entropy" in available else set()
    return [name for name in _LABELS if (name in available or name in measured) and name not in hidden][:MOST_CHARTS]
