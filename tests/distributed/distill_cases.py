"""What rank pools run: steps of a distillation, and what they did to a model; and the same with plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from holdfast.data.batches.packing import pack, unpack
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.recipes.distill import distill, distill_step
from holdfast.training.distillation.build import build_distillation_run
from holdfast.training.distillation.run import evaluate_distilled
from holdfast.training.other_models.reference import ServedModel, scored
from holdfast.training.run import StepAbandoned
from holdfast.training.setup.begin import Live
from holdfast.types import MiniBatch
from tests.distributed.cases import recorded_gradients
from tests.distributed.preference_cases import descend, parameters_of
from tests.oracle import distillation as oracle
from tests.trees import run_from_mapping

Text = tuple[list[int], list[bool]]
"""Tokens, and which of them are trained."""


def settings(student: Path, teacher: Path, /, **sections: Any) -> dict[str, Any]:
    """Return a small run's tree; sections are merged over the defaults."""
    tree: dict[str, Any] = {
        "steps": 2,
        "model": {"path": str(student), "dtype": "float64"},
        "teacher": {"path": str(teacher)},
        "data": {"path": "rows", "batch_size": 4, "max_length": 48, "shuffle": False},
        "optim": {"kind": "sgd", "lr": 0.5, "schedule": "constant", "clip_norm": None},
        "metrics": {"progress": "off"},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) else values
    return tree


def train(world: World, tree: dict[str, Any], rows: Any, steps: int = 2) -> dict[str, Any]:
    """Train and return metrics, gradients, parameters, the texts of every step, and what became of the teacher."""
    training = build_distillation_run(run_from_mapping(tree), Path.cwd(), world, Live(rows=rows))
    gradients = recorded_gradients(training.model)
    texts: list[dict[int, Text]] = []

    def read(module: Any, args: Any) -> None:
        texts[-1] |= {one.sample_id: (one.tokens.tolist(), one.loss_mask.tolist()) for one in unpack(args[0])}

    training.model.module.register_forward_pre_hook(read)
    lines = []
    for _ in range(steps):
        texts.append({})
        metrics = distill_step(training)
        assert metrics is not None
        lines.append(metrics)
    parameters = sharded_parameters(training.model.module)
    teacher = sharded_parameters(training.evaluation.asked.model)
    placed = {(isinstance(value, DTensor), value.requires_grad, value.grad is None) for value in teacher.values()}
    held = sum(value.to_local().numel() if isinstance(value, DTensor) else value.numel() for value in teacher.values())
    everyone = [
        {number: text for part in training.run.ranks.gather(of_step) for number, text in part.items()}
        for of_step in texts
    ]
    return {
        "lines": lines,
        "gradients": gradients,
        "parameters": {name: full_tensor(p).double().numpy().copy() for name, p in parameters.items()},
        "texts": [[text for _, text in sorted(of_step.items())] for of_step in everyone],
        "teacher": {name: full_tensor(value).numpy().copy() for name, value in teacher.items()},
        "placed": placed,
        "held": held,
        "evaluated": evaluate_distilled(training.evaluation, interrupted=lambda: False),
    }


def abandoned(world: World, tree: dict[str, Any], rows: Any) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Leave a step while the student writes; return where the stream stood before and after, and the next loss."""
    training = build_distillation_run(run_from_mapping(tree), Path.cwd(), world, Live(rows=rows))
    before = training.stream.state()
    training.run.interrupted = lambda: world.rank == world.size - 1
    with pytest.raises(StepAbandoned):
        distill_step(training)
    after = training.stream.state()
    training.run.interrupted = lambda: False
    line = distill_step(training)
    assert line is not None
    return before, after, line["loss"]


def measured(world: World, tree: dict[str, Any], rows: Any, steps: int = 2) -> dict[str, Any]:
    """Train and return the metrics of every step, those of an evaluation at the end, and the teacher's mark."""
    training = build_distillation_run(run_from_mapping(tree), Path.cwd(), world, Live(rows=rows))
    lines = [distill_step(training) for _ in range(steps)]
    return {
        "lines": lines,
        "evaluated": evaluate_distilled(training.evaluation),
        "mark": training.identity["model"]["teacher"],
    }


def spoiled_after_a_step(world: World, tree: dict[str, Any], rows: Any, faults: str, fault: str) -> None:
    """Make a step, spoil the teacher's server, and make another."""
    training = build_distillation_run(run_from_mapping(tree), Path.cwd(), world, Live(rows=rows))
    distill_step(training)
    training.run.ranks.gather(None)
    Path(faults).write_text(fault)
    distill_step(training)


def evaluated_twice(world: World, tree: dict[str, Any], rows: Any) -> list[dict[str, float]]:
    """Return the metrics of evaluations before and after a step."""
    training = build_distillation_run(run_from_mapping(tree), Path.cwd(), world, Live(rows=rows))
    before = evaluate_distilled(training.evaluation)
    distill_step(training)
    return [before, evaluate_distilled(training.evaluation)]


def idle(world: World, tree: dict[str, Any], rows: Any) -> None:
    """Let the teacher's server score a batch that holds nothing on any rank."""
    training = build_distillation_run(run_from_mapping(tree), Path.cwd(), world, Live(rows=rows))
    assert isinstance(training.evaluation.asked.model, ServedModel)
    idle_batch = MiniBatch((pack([], []),), 0.0, 0, 0, 0)
    scored(training.model, training.evaluation.asked.model, idle_batch, "teacher_logprobs")


def finished(world: World, tree: dict[str, Any], rows: Any) -> dict[str, float]:
    """Run to the end as the command does."""
    return distill(run_from_mapping(tree), Path(), world, Live(rows=rows)).metrics


def by_hand(
    student: Any, teachers: Any, texts: Sequence[Sequence[Text]], lr: float, *, sampled: bool = False, **loss: float
) -> dict[str, Any]:
    """Make the updates with plain transformers, a text at a time.

    Args:
        student: A model.
        teachers: Another one, or pairs of weights and models.
        texts: Of every step.
        lr: Of plain descent.
        sampled: The loss is the policy gradient on the texts.
        loss: Arguments of the oracle.
    """
    weighted = teachers if isinstance(teachers, list) else [(1.0, teachers)]
    sft = loss.pop("sft", 0.0)
    losses, gradients, divergences = [], [], []
    for of_step in texts:
        total: Any = 0.0
        apart, count = 0.0, 0
        for tokens, mask in of_step:
            ids, trained = torch.tensor(tokens), torch.tensor(mask[1:])
            own, targets = oracle.logits_of(student, ids)[trained], ids[1:][trained]
            chosen = own.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
            total = total - sft * chosen.sum()
            for weight, teacher in weighted:
                with torch.no_grad():
                    theirs = oracle.logits_of(teacher, ids)[trained]
                if sampled:
                    said = theirs.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
                    terms, divergence = (chosen - said).detach() * chosen, chosen - said
                else:
                    terms, divergence = oracle.losses(own, theirs, targets, **loss)
                total = total + weight * terms.sum()
                apart += weight * float(divergence.detach().sum())
            count += len(targets)
        losses.append(float(total.detach()) / count)
        divergences.append(apart / count)
        gradients.append(descend(student, total / count, lr))
    return {
        "losses": divergences if sampled else losses,
        "divergences": divergences,
        "gradients": gradients,
        "parameters": parameters_of(student),
    }


def texts_of(rows: Sequence[dict[str, str]], tokenizer: Any) -> list[Text]:
    """Return rows as texts, without our own reading of rows."""
    found = []
    for row in rows:
        prompt, answer = (tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in row)
        tokens = [*prompt, *answer, tokenizer.eos_token_id]
        found.append((tokens, (np.arange(len(tokens)) >= len(prompt)).tolist()))
    return found
