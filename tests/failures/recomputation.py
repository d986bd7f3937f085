"""Cases about activation checkpointing: a cache that is filled twice, and gradients that get lost on the way."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointError, checkpoint

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.errors import ConfigError
from tests.distributed.cases import reference, rows_of, settings, train
from tests.distributed.test_lora import examples
from tests.distributed.test_split_invariance import by_hand
from tests.failures.gradients import error_of_gradients
from tests.failures.lab import Lab, Observed, largest_error
from tests.tiny import tiny_directory, tiny_model

TOKENS = torch.randint(2, 90, (2, 25), generator=torch.Generator().manual_seed(1))


def attention_with_a_cache(*, reentrant: bool | None) -> Tensor:
    """Return the gradient of a key matrix whose products go into a cache that outlives the forward pass."""
    torch.manual_seed(0)
    inputs = torch.randn(1, 1, 25, 16, requires_grad=True)
    weight = torch.randn(16, 16, requires_grad=True)
    cache: list[Tensor] = []

    def block(inputs: Tensor, weight: Tensor) -> Tensor:
        cache.append(inputs @ weight)
        keys = torch.cat(cache, 2)
        return scaled_dot_product_attention(inputs, keys, keys, is_causal=True)

    run = block if reentrant is None else partial(checkpoint, block, use_reentrant=reentrant)
    run(inputs, weight).square().sum().backward()
    return weight.grad if weight.grad is not None else torch.zeros(())


def gradients(model: nn.Module, implementation: CheckpointImpl | None, **inputs: Any) -> dict[str, Tensor]:
    """Return the gradients of a transformers model, its layers wrapped from outside as other trainers do."""
    if implementation is not None:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=implementation),
            check_fn=lambda module: type(module).__name__.endswith("DecoderLayer"),
        )
    model.train()
    model(input_ids=TOKENS, labels=TOKENS, **inputs).loss.backward()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): value.grad
        for name, value in model.named_parameters()
        if value.grad is not None
    }


def naive(lab: Lab) -> Observed:
    numbers: dict[str, Any] = {"norm": float(attention_with_a_cache(reentrant=None).norm())}
    try:
        attention_with_a_cache(reentrant=False)
    except CheckpointError as error:
        numbers["error"] = str(error)
    numbers["reentrant"] = float(attention_with_a_cache(reentrant=True).norm())
    kept = gradients(tiny_model("llama"), None, use_cache=False)
    hidden = gradients(tiny_model("llama"), CheckpointImpl.REENTRANT)
    numbers["zero"] = sorted(name for name in kept if float(hidden[name].abs().max()) == 0.0)
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    try:
        gradients(tiny_model("llama"), CheckpointImpl.NO_REENTRANT, attention_mask=mask)
    except RuntimeError as error:
        numbers["padded"] = str(error)
    options: dict[str, Any] = {"use_cache": False, "output_router_logits": True}
    experts = gradients(tiny_model("mixtral"), None, **options)
    lost = gradients(tiny_model("mixtral"), CheckpointImpl.REENTRANT, **options)
    gates = {name: value for name, value in experts.items() if "gate.weight" in name}
    numbers["gate"] = largest_error({name: lost[name] for name in gates}, gates)
    words = (
        "CheckpointError, [1, 1, 25, 16] saved, [1, 1, 50, 16] recomputed; with use_reentrant=True no error, and a "
        f"gradient of norm {numbers['reentrant']:.0f} for {numbers['norm']:.0f}; in a Llama {len(numbers['zero'])} key "
        f"and value weights get zero gradients, in a Mixtral the gate's are {100 * numbers['gate']:.1f}% off"
    )
    loud = "error" in numbers or "padded" in numbers
    silent = numbers["reentrant"] == 0.0 or bool(numbers["zero"]) or numbers["gate"] > 1e-6
    return Observed(not loud and not silent, words, numbers)


def with_cache(path: Path, kind: str) -> str:
    """Write a tiny model whose configuration asks for a cache."""
    tiny_directory(path, kind)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_cache": True}))
    return str(path)


def ours(lab: Lab) -> Observed:
    llama, mixtral = with_cache(lab.folder / "llama", "llama"), with_cache(lab.folder / "mixtral", "mixtral")
    full = {"recompute": "full"}
    expected = reference(tiny_model("llama").double(), [examples()[:8]], by_hand("token_mean"), 0.1)
    errors = {}
    for attention in ("packed", "sdpa"):
        tree = settings(llama, model={"attention": attention}, parallel=full)
        errors[attention] = error_of_gradients(lab.pool(2).run(train, tree, rows_of(24), 1)[0], expected)
    kept = lab.pool(2).run(train, settings(mixtral), rows_of(24), 1)[0]
    again = lab.pool(2).run(train, settings(mixtral, parallel=full), rows_of(24), 1)[0]
    gates = [name for name in kept["gradients"][0] if name.endswith("gate.weight")]
    errors["mixtral"] = error_of_gradients(again, kept)
    try:
        from_mapping(settings(llama, parallel={"recompute": {"kind": "full", "use_reentrant": True}}), SFTConfig)
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    smallest = min(float(abs(again["gradients"][0][name]).max()) for name in gates)
    words = (
        f"gradients within {max(errors['packed'], errors['sdpa']):.0e} of plain transformers with use_cache in the "
        f"configuration, the gate's within {errors['mixtral']:.0e} of those without recomputation; use_reentrant: true "
        "is refused"
    )
    holds = max(errors.values()) < 1e-10 and smallest > 0 and "loses gradients" in refusal
    return Observed(holds, words, {"errors": errors, "gates": gates, "smallest": smallest, "refusal": refusal})
