"""The router loss and the loads of experts, by hand from the logits that plain transformers gives out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def router_loss(layers: Sequence[Tensor], top_k: int) -> Tensor:
    """Return E sum_e f_e P_e over the tokens of all layers, in the logits' own precision.

    Args:
        layers: [T, E] of each layer.
        top_k: Experts per token.
    """
    logits = torch.cat(list(layers))
    experts = logits.shape[1]
    ranked = np.argsort(-logits.detach().numpy(), axis=1)[:, :top_k]
    fractions = np.bincount(ranked.ravel(), minlength=experts) / len(ranked)
    probabilities = (logits - logits.logsumexp(1, keepdim=True)).exp().mean(0)
    return experts * (torch.as_tensor(fractions, dtype=logits.dtype) * probabilities).sum()


def loads(layers: Sequence[Tensor], top_k: int) -> np.ndarray:
    """Return [layers, E] how many tokens each layer sent to each expert."""
    rows = []
    for logits in layers:
        ranked = np.argsort(-logits.detach().numpy(), axis=1)[:, :top_k]
        rows.append(np.bincount(ranked.ravel(), minlength=logits.shape[1]))
    return np.array(rows)


def reference(model: Any, batches: list[list[Any]], kind: str, coefficient: float, lr: float) -> dict[str, Any]:
    """Train with plain transformers, one sequence at a time: the token mean and a router loss beside it.

    Args:
        model: In float64.
        batches: Examples of each update.
        kind: off, sequence, or batch: over all sequences of an update together.
        coefficient: Of the router loss.
        lr: Of plain gradient descent.
    """
    top_k = model.config.num_experts_per_tok
    result: dict[str, Any] = {name: [] for name in ("losses", "norms", "gradients", "router_losses", "loads")}
    for batch in batches:
        total: Any = 0.0
        balance: Any = 0.0
        seen = []
        count = sum(int(example.loss_mask.sum()) for example in batch)
        for example in batch:
            tokens = torch.as_tensor(example.tokens)[None]
            output = model(input_ids=tokens, output_router_logits=True, use_cache=False)
            chosen = output.logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None]).squeeze(1)
            total = total - (chosen * torch.as_tensor(example.loss_mask[1:])).sum()
            balance = balance + router_loss(output.router_logits, top_k) * int(example.loss_mask.sum()) / count
            seen.append(output.router_logits)
        layers = [torch.cat([of_one[layer] for of_one in seen]) for layer in range(len(seen[0]))]
        if kind == "batch":
            balance = router_loss(layers, top_k)
        loss = total / count + (coefficient * balance if kind != "off" else 0.0)
        model.zero_grad()
        loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        result["losses"].append(float(loss.detach()))
        result["router_losses"].append(float(balance.detach()))
        result["loads"].append(loads(layers, top_k))
        result["norms"].append(float(torch.stack([(g**2).sum() for g in found.values()]).sum().sqrt()))
        result["gradients"].append({name: g.numpy() for name, g in found.items()})
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in found:
                    parameter.sub_(lr * found[name])
    return result
