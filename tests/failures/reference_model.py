"""Cases about a second model beside the policy, and about parameters that a forward pass leaves gathered."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.data.batches.packing import Share, pack
from holdfast.models.heads.policy import PolicyModel
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.training.policy.build import build_policy_run
from holdfast.training.setup.begin import Live
from holdfast.types import Example, Scores
from tests.distributed.grpo_cases import prompts_of, settings
from tests.failures.gradients import shard_blocks
from tests.failures.lab import Lab, Observed
from tests.tiny import tiny_directory, tiny_model

TOKENS = torch.arange(2, 26)[None]
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def logprobs(model: Any) -> Tensor:
    """Return the log-probability of each token."""
    with torch.no_grad():
        logits = model(input_ids=TOKENS, use_cache=False).logits.float()
    return logits[:, :-1].log_softmax(-1).gather(-1, TOKENS[:, 1:, None])[..., 0]


def gathered(model: nn.Module) -> float:
    """Return the share of parameters that are whole on this rank now."""
    total = sum(value.numel() for value in model.parameters())
    return sum(value.numel() for value in model.parameters() if not isinstance(value, DTensor)) / total


def shares(model: nn.Module, last_block: nn.Module, run: Any) -> tuple[float, float]:
    """Return how much is gathered while the last block runs, and afterwards."""
    seen: list[float] = []
    hook = last_block.register_forward_pre_hook(lambda *_: seen.append(gathered(model)))
    with torch.no_grad():
        run()
    hook.remove()
    return seen[0], gathered(model)


# 5: the reference policy


def placed_by_trl(model: Any) -> Any:
    """Let TRL place a model on an accelerator whose plugin asks for FSDP2, layer by layer."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from trl.models import prepare_fsdp

    warnings.simplefilter("ignore")
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(  # accelerate never chooses FSDP on a CPU
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    try:
        return prepare_fsdp(model, accelerator)
    finally:
        AcceleratorState._reset_state(True)


def place_a_reference(world: World) -> dict[str, Any]:
    """Place a reference by other code than the policy, and cast another as a whole; compare both with the policy."""
    has_trl = find_spec("trl") is not None
    model = placed_by_trl(tiny_model("llama")) if has_trl else fully_shard(tiny_model("llama")).eval()
    during, after = shares(model, model.model.layers[-1], lambda: logprobs(model))
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    frozen = not any(value.requires_grad for value in model.parameters())
    policy = shard_blocks(tiny_model("llama"), (), mp_policy=HALF)
    cast = shard_blocks(tiny_model("llama").to(torch.bfloat16), ())
    gap = float((logprobs(policy) - logprobs(cast)).abs().max())
    by = "TRL" if has_trl else "fully_shard"
    return {"by": by, "during": during, "after": after, "units": units, "frozen": frozen, "gap": gap}


def naive_reference(lab: Lab) -> Observed:
    found = lab.pool(2).run(place_a_reference)[0]
    words = (
        f"{found['by']} wraps the root alone: {100 * found['during']:.0f}% of the reference is whole on each rank in a "
        f"forward pass, and it is {'' if found['frozen'] else 'not '}frozen; one made by .to(bfloat16) starts "
        f"{found['gap']:.4f} nats off the policy"
    )
    return Observed(found["during"] < 1 and found["frozen"] and found["gap"] == 0, words, found)


def build_with_a_reference(world: World, directory: str, kind: str) -> dict[str, Any]:
    """Build a GRPO run and compare both policies on a batch in bfloat16."""
    tree = settings(
        directory,
        model={"dtype": "float32"},
        parallel={"compute_dtype": "bfloat16"},
        kl={"coefficient": 0.1},
        reference={"kind": kind},
    )
    config = from_mapping(tree, GRPOConfig)
    training = build_policy_run(config, Path.cwd(), world, lambda samples: [], Live(rows=prompts_of(8)))
    reference = training.reference
    assert isinstance(reference, PolicyModel)
    tokens = TOKENS[0].numpy()
    batch = pack([Example(0, 0, tokens, np.arange(tokens.size) > 0)], [Share(1.0, 1.0)], padded=reference.padded)
    found: dict[str, Scores] = {}

    def score(name: str, model: PolicyModel) -> None:
        scores = model(batch)
        assert isinstance(scores, Scores)
        found[name] = scores

    with torch.no_grad():
        score("policy", training.model.module)
    during, after = shares(reference, reference.language_model.model.layers[-1], lambda: score("reference", reference))
    return {
        "during": during,
        "after": after,
        "units": sum(isinstance(module, FSDPModule) for module in reference.modules()),
        "frozen": not any(value.requires_grad for value in reference.parameters()),
        "gap": float((found["policy"].logprobs - found["reference"].logprobs).abs().max()),
        "frequencies": str(next(iter(reference.buffers())).dtype),
    }


def ours_reference(lab: Lab) -> Observed:
    directory = str(tiny_directory(lab.folder / "llama", "llama"))
    found = {kind: lab.pool(2).run(build_with_a_reference, directory, kind)[0] for kind in ("sharded", "offloaded")}
    sharded = found["sharded"]
    words = (
        f"{sharded['units']} units: {100 * sharded['during']:.0f}% of it is whole while the last block runs, "
        f"{100 * sharded['after']:.0f}% afterwards; frozen; log-probabilities of policy and reference differ by "
        f"{max(each['gap'] for each in found.values())}, in host memory too"
    )
    holds = all(
        each["frozen"] and each["gap"] == 0 and each["during"] < 1 and each["frequencies"] == "torch.float32"
        for each in found.values()
    )
    return Observed(holds and sharded["after"] == 0, words, found)


# 6.7: parameters that a forward pass without gradients leaves gathered


def follow_the_policy(world: World, ours: bool) -> dict[str, Any]:
    """Move a reference halfway to a policy after an evaluation, and write zeros into what it left gathered."""
    policy, reference = (
        shard_blocks(model, model.model.layers) for model in (tiny_model("llama"), tiny_model("llama"))
    )
    start = {name: full_tensor(value.detach()).clone() for name, value in reference.named_parameters()}
    with torch.no_grad():
        for value in sharded_parameters(policy).values():
            value.add_(1.0)
    logprobs(reference)
    left = sorted(name for name, value in reference.named_parameters() if not isinstance(value, DTensor))
    error = ""
    try:
        with torch.no_grad():
            mine = sharded_parameters(reference) if ours else dict(reference.named_parameters())
            for name, value in sharded_parameters(policy).items():
                mine[name].mul_(0.5).add_(value, alpha=0.5)
    except RuntimeError as raised:
        error = str(raised)
    expected = tiny_model("llama")
    with torch.no_grad():
        for name, value in expected.named_parameters():
            value.copy_(start[name] + 0.5)
    follows = float((logprobs(reference) - logprobs(expected)).abs().max())
    return {"left": left, "error": error, "follows": follows}


def zeros_into_gathered(world: World) -> dict[str, float]:
    """Write zeros into parameters that an evaluation left gathered; return their largest element afterwards."""
    reference = tiny_model("llama")
    shard_blocks(reference, reference.model.layers)
    logprobs(reference)
    left = [name for name, value in reference.named_parameters() if not isinstance(value, DTensor)]
    with torch.no_grad():
        for name in left:
            reference.get_parameter(name).zero_()
    for module in reference.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: float(full_tensor(reference.get_parameter(name).detach()).abs().max()) for name in left}


def naive_gathered(lab: Lab) -> Observed:
    found = lab.pool(2).run(follow_the_policy, False)[0]
    zeroed = lab.pool(2).run(zeros_into_gathered)[0]
    words = (
        f"after a forward pass {len(found['left'])} parameters are left whole: a moving average raises "
        f"{found['error'][:75]!r}; zeros written into them are lost (largest element {max(zeroed.values()):.2f})"
    )
    return Observed(not found["error"] and not any(zeroed.values()), words, found | {"zeroed": zeroed})


def ours_gathered(lab: Lab) -> Observed:
    ranks = lab.pool(2).run(follow_the_policy, True)
    gap = max(rank["follows"] for rank in ranks)
    words = f"sharded_parameters() gives them back first; the average shows in the next pass within {gap:.0e}"
    return Observed(gap < 1e-5 and not any(rank["error"] for rank in ranks), words, {"ranks": ranks})
