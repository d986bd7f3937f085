"""What rank pools run: whole runs with rows in memory, and what they did to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.activations import offload_of
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.recipes.sft import sft_step
from holdfast.training.run import Model
from holdfast.training.setup.begin import Live, build_run


def rows_of(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return prompt/completion rows of uneven lengths."""
    generator = np.random.default_rng(seed)
    letters = np.array(list("abcdefghij"))
    return [
        {
            "prompt": "copy " + "".join(generator.choice(letters, generator.integers(1, 9))) + "=",
            "completion": "".join(generator.choice(letters, generator.integers(1, 30))),
        }
        for _ in range(count)
    ]


def settings(directory: str, **sections: Any) -> dict[str, Any]:
    """Return a small run's tree; sections are merged over the defaults."""
    tree: dict[str, Any] = {
        "steps": 3,
        "model": {"path": directory, "dtype": "float64"},
        "data": {"path": "rows", "batch_size": 8, "max_length": 48, "tokens_per_micro_batch": 4096, "shuffle": False},
        "optim": {"kind": "sgd", "lr": 0.1, "schedule": "constant", "clip_norm": None},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) else values
    return tree


def recorded_gradients(model: Model) -> list[dict[str, Any]]:
    """Return the list that every update will add its gradients to, whole and by name."""
    names = {id(parameter): name for name, parameter in sharded_parameters(model.module).items()}
    # By position: a step in host memory is made on other parameters.
    ordered = [names[id(parameter)] for group in model.optimizer.param_groups for parameter in group["params"]]
    gradients: list[dict[str, Any]] = []

    def keep(optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients.append(
            {
                name: full_tensor(parameter.grad).double().numpy().copy()
                for name, parameter in zip(ordered, parameters, strict=True)
                if parameter.grad is not None
            }
        )

    model.optimizer.register_step_pre_hook(keep)
    return gradients


def train(world: World, tree: dict[str, Any], rows: Any, steps: int = 3) -> dict[str, Any]:
    """Train and return losses, norms, first gradients, final parameters and the sample ids of every step."""
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows))
    gradients = recorded_gradients(training.model)
    offload = offload_of(training.model.module)
    copied_before = offload.copied_bytes if offload else 0  # checks before step 1 run passes too
    losses, norms, forwards, lines = [], [], [], []
    for _ in range(steps):
        update = sft_step(training)
        assert update is not None
        metrics = update.read().metrics
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
        forwards.append(metrics["data/micro_batches"])
        lines.append(metrics)
    final = {
        name: full_tensor(p).double().numpy().copy() for name, p in sharded_parameters(training.model.module).items()
    }
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "parameters": final,
        "micro_batches": forwards,
        "metrics": lines,
        "rows_tokenised": training.stream.rows_tokenised,
        "padded": training.model.module.padded,
        "offloaded_bytes": offload.copied_bytes - copied_before if offload else 0,
    }


def reference(  # noqa: PLR0913 - what an update is made of
    model: Any,
    batches: list[list[Any]],
    weigh: Any,
    lr: float,
    inputs_of: Any = lambda _: {},
    clip_norm: float = float("inf"),
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Do the same with plain transformers, one sequence at a time and one process.

    Args:
        model: A transformers model in float64.
        batches: Examples of each step.
        weigh: examples -> (weight per sequence, count per sequence), by hand.
        lr: Of plain gradient descent.
        inputs_of: example -> what the model gets besides tokens.
        clip_norm: A gradient with a larger norm is scaled down to it.
        optimizer: Over the model's parameters, instead of plain gradient descent.
    """
    losses, norms, gradients = [], [], []
    for batch in batches:
        weights, counts = weigh(batch)
        total: Any = 0.0
        for example, weight in zip(batch, weights, strict=True):
            tokens = torch.as_tensor(example.tokens)[None]
            logprobs = model(input_ids=tokens, **inputs_of(example)).logits.log_softmax(-1)[0, :-1]
            chosen = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
            total = total - (chosen * torch.as_tensor(example.loss_mask[1:])).sum() * weight
        loss = total / sum(counts)
        model.zero_grad()
        loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        losses.append(float(loss.detach()))
        norms.append(float(torch.stack([(g**2).sum() for g in found.values()]).sum().sqrt()))
        factor = min(1.0, clip_norm / norms[-1])
        found = {name: gradient * factor for name, gradient in found.items()}
        gradients.append({name: g.numpy() for name, g in found.items()})
        if optimizer is not None:
            optimizer.step()
            continue
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in found:
                    parameter.sub_(lr * found[name])
    final = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": final}
