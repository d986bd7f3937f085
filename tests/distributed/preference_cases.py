"""What rank pools run: steps on preferences, and what they did to a model; and the same with plain transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.config.verbs.dpo import PairDataConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.preferences import LabelTokeniser, PairTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.models.heads.policy import PolicyModel
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.recipes.dpo import dpo_step
from holdfast.training.other_models.reference import scored
from holdfast.training.preference.build import build_preference_run
from holdfast.training.preference.run import evaluate_preferences
from holdfast.training.setup.begin import Live
from holdfast.types import Example
from tests.distributed.cases import recorded_gradients
from tests.oracle import preference as oracle
from tests.trees import run_from_mapping

MAX_LENGTH = 48
LETTERS = np.array(list("abcdefghij"))


def pairs_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return pairs whose prompts and answers have uneven lengths; every third pair begins its answers alike."""
    generator = np.random.default_rng(seed)

    def word(least: int, most: int) -> str:
        return "".join(generator.choice(LETTERS, generator.integers(least, most)))

    rows = []
    for number in range(count):
        begin = word(2, 6) if number % 3 == 0 else ""
        rows.append(
            {
                "prompt": f"copy {word(1, 9)}=",
                "chosen": f"{begin}{word(1, 20)}a",
                "rejected": f"{begin}{word(1, 20)}b",
            }
        )
    return rows


def labelled_of(count: int) -> list[dict[str, Any]]:
    """Return the same answers one by one, with labels."""
    rows = []
    for number, pair in enumerate(pairs_of(count)):
        label = number % 3 != 1
        completion = pair["chosen" if label else "rejected"]
        rows.append({"prompt": pair["prompt"], "completion": completion, "label": label})
    return rows


def settings(directory: str, **sections: Any) -> dict[str, Any]:
    """Return a small run's tree; sections are merged over the defaults."""
    tree: dict[str, Any] = {
        "steps": 3,
        "model": {"path": directory, "dtype": "float64"},
        "data": {"path": "rows", "batch_size": 4, "max_length": MAX_LENGTH, "shuffle": False},
        "preference": {"loss": {"kind": "dpo", "beta": 0.3}},
        "optim": {"kind": "sgd", "lr": 0.5, "schedule": "constant", "clip_norm": None},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) else values
    return tree


def train(world: World, tree: dict[str, Any], rows: Any, steps: int = 3) -> dict[str, Any]:
    """Train and return metrics, gradients, final parameters, how often models were called, and the phases timed."""
    training = build_preference_run(run_from_mapping(tree), Path.cwd(), world, Live(rows=rows))
    gradients = recorded_gradients(training.model)
    calls = {"policy": 0, "reference": 0}
    _count(training.model.module, calls, "policy")
    if isinstance(training.evaluation.reference, PolicyModel):
        _count(training.evaluation.reference, calls, "reference")
    lines, forwards = [], []
    for _ in range(steps):
        before = dict(calls)
        metrics = dpo_step(training)
        assert metrics is not None
        lines.append(metrics)
        forwards.append({name: calls[name] - before[name] for name in calls})
    final = {
        name: full_tensor(p).double().numpy().copy() for name, p in sharded_parameters(training.model.module).items()
    }
    timed = {name.removeprefix("timing/") for name in training.run.log.clock.read()}
    return {"lines": lines, "gradients": gradients, "parameters": final, "forwards": forwards, "timed": timed}


def scored_while_training(world: World, tree: dict[str, Any], rows: Any) -> dict[str, np.ndarray]:
    """Return what the policy and its reference say of the first update's tokens, the policy twice."""
    training = build_preference_run(run_from_mapping(tree), Path.cwd(), world, Live(rows=rows))
    assert training.model.module.training
    mini_batch = training.stream.next(1)
    assert mini_batch is not None
    models = {
        "policy": training.model.module,
        "again": training.model.module,
        "reference": training.evaluation.reference,
    }
    found = {}
    for name, model in models.items():
        assert model is not None
        batches = scored(training.model, model, mini_batch, "said").micro_batches
        found[name] = np.concatenate([batch.per_token["said"].flatten().numpy() for batch in batches])
    assert training.model.module.training
    return found


def evaluate(world: World, tree: dict[str, Any], rows: Any, steps: int) -> dict[str, float]:
    """Train, and return what the evaluation sets say afterwards."""
    training = build_preference_run(run_from_mapping(tree), Path.cwd(), world, Live(rows=rows))
    for _ in range(steps):
        dpo_step(training)
    return evaluate_preferences(training.evaluation, interrupted=lambda: False)


def _count(model: PolicyModel, calls: dict[str, int], name: str) -> None:
    def add(*_: Any) -> None:
        calls[name] += 1

    model.register_forward_pre_hook(add)


@dataclass(frozen=True)
class Seen:
    """What an oracle needs of a model that sees."""

    side: ImageSide
    tokenizer: Any
    max_length: int = MAX_LENGTH
    upstream: Callable[[Example], dict[str, Any]] | None = None
    """What transformers' own forward gets of a sequence, where it is not what `side` says."""


def sequences_of(rows: Sequence[dict[str, Any]], seen: Seen | None = None) -> list[tuple[Example, ...]]:
    """Return the sequences of each row."""
    config = PairDataConfig(path="rows", max_length=MAX_LENGTH if seen is None else seen.max_length)
    if seen is None:
        tokeniser = RowTokeniser(character_tokenizer(), config, Path.cwd())
    else:
        tokeniser = RowTokeniser(seen.tokenizer, config, Path.cwd(), seen.side)
    tokenise = LabelTokeniser(tokeniser, config) if "label" in rows[0] else PairTokeniser(tokeniser, config)
    return [tokenise(row, number, "rows", "row").examples for number, row in enumerate(rows)]


def images_of(example: Example, tokens: Any, seen: Seen | None) -> dict[str, Any]:
    """Return what transformers' own forward gets of a sequence's images."""
    if seen is None or not example.model_inputs:
        return {}
    if seen.upstream is not None:
        return seen.upstream(example)
    given = seen.side.upstream_inputs(np.asarray(tokens), example.model_inputs)
    return {name: torch.as_tensor(values) for name, values in given.items()}


def answer_logprob(model: Any, tokens: Any, loss_mask: Any, images: dict[str, Any] | None = None) -> torch.Tensor:
    """Return the log-probability of one sequence's trained tokens."""
    whole = torch.as_tensor(tokens)[None]
    logprobs = model(input_ids=whole, **(images or {})).logits.log_softmax(-1)[0, :-1]
    chosen = logprobs.gather(1, whole[0, 1:, None]).squeeze(1)
    return (chosen * torch.as_tensor(loss_mask[1:])).sum()


def by_hand(  # noqa: PLR0913 - a model that sees needs one more
    model: Any,
    rows: Sequence[dict[str, Any]],
    loss: oracle.Loss,
    lr: float,
    batch: int = 4,
    seen: Seen | None = None,
) -> dict[str, Any]:
    """Make the same updates with plain transformers, a sequence at a time, and derivatives of the loss by hand."""
    reference = copy.deepcopy(model)
    sequences = sequences_of(rows, seen)
    losses, margins, gradients = [], [], []
    for start in range(0, len(rows), batch):
        total, linear, gap = 0.0, torch.zeros((), dtype=torch.float64), 0.0
        pairs = sequences[start : start + batch]
        for pair in pairs:
            logprobs, answers = [], []
            for example in pair:
                images = images_of(example, example.tokens, seen)
                logprob = answer_logprob(model, example.tokens, example.loss_mask, images)
                with torch.no_grad():
                    before = answer_logprob(reference, example.tokens, example.loss_mask, images)
                length = example.trained_tokens
                answers.append(
                    oracle.Answer(float(logprob.detach() - before), float(logprob.detach()) / length, length)
                )
                logprobs.append(logprob)
            value, *slopes = loss(*answers)
            total += value / len(pairs)
            gap += (answers[0].r - answers[1].r) / len(pairs)
            for side in (0, 1):
                slope = slopes[side] + slopes[2 + side] / answers[side].length
                linear = linear + slope * logprobs[side] / len(pairs)
        losses.append(total)
        margins.append(gap)
        gradients.append(descend(model, linear, lr))
    return {"losses": losses, "margins": margins, "gradients": gradients, "parameters": parameters_of(model)}


def kto_by_hand(  # noqa: PLR0913 - a model that sees needs one more
    model: Any,
    rows: Sequence[dict[str, Any]],
    beta: float,
    lr: float,
    batch: int = 4,
    seen: Seen | None = None,
) -> dict[str, Any]:
    """Make KTO's updates in the same way; z0 is measured with each prompt before the answer of the batch's next row."""
    reference = copy.deepcopy(model)
    sequences = [examples[0] for examples in sequences_of(rows, seen)]
    losses, divergences, gradients = [], [], []
    for start in range(0, len(rows), batch):
        members, labels = sequences[start : start + batch], [row["label"] for row in rows[start : start + batch]]
        next_ones = members[1:] + members[:1]
        z0 = kl_of_other_answers(model, reference, list(zip(members, next_ones, strict=True)), seen)
        total, linear = 0.0, torch.zeros((), dtype=torch.float64)
        for example, label in zip(members, labels, strict=True):
            images = images_of(example, example.tokens, seen)
            logprob = answer_logprob(model, example.tokens, example.loss_mask, images)
            with torch.no_grad():
                before = answer_logprob(reference, example.tokens, example.loss_mask, images)
            value, slope = oracle.kto(beta, z0, label, 1.0, float(logprob.detach() - before))
            total += value / len(members)
            linear = linear + slope * logprob / len(members)
        losses.append(total)
        divergences.append(z0)
        gradients.append(descend(model, linear, lr))
    return {"losses": losses, "kl": divergences, "gradients": gradients, "parameters": parameters_of(model)}


@torch.no_grad()
def kl_of_other_answers(
    model: Any, reference: Any, pairs: Sequence[tuple[Example, Example]], seen: Seen | None = None
) -> float:
    """Return z0 of the first ones' prompts with the second ones' answers."""
    ratios = []
    for example, other in pairs:
        prompt = example.tokens[: int(example.loss_mask.argmax())]
        answer = other.tokens[int(other.loss_mask.argmax()) :]
        tokens = np.concatenate([prompt, answer])[: MAX_LENGTH if seen is None else seen.max_length]
        mask = np.arange(tokens.size) >= prompt.size
        images = images_of(example, tokens, seen)
        ratios.append(
            float(answer_logprob(model, tokens, mask, images) - answer_logprob(reference, tokens, mask, images))
        )
    return max(0.0, float(np.mean(ratios)))


def descend(model: Any, loss: torch.Tensor, lr: float) -> dict[str, Any]:
    """Take a step of plain gradient descent; return the gradients."""
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in found:
                parameter.sub_(lr * found[name])
    return {name: gradient.numpy() for name, gradient in found.items()}


def parameters_of(model: Any) -> dict[str, Any]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
