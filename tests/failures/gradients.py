"""Cases about gradients: whose they are, what they are divided by, and one rank that spoils them for all."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from holdfast.parallel.mesh import World
from holdfast.parallel.stream import full_tensor
from tests.distributed.cases import reference, rows_of, settings, train
from tests.distributed.test_lora import examples
from tests.distributed.test_sharding_rules import different_experts, poisoned_steps
from tests.distributed.test_split_invariance import by_hand
from tests.distributed.test_vision import ROWS, oracle, tree, with_zeros
from tests.distributed.toys import Experts, Toy
from tests.failures.lab import Lab, Observed, doomed, first_line, largest_error, whole_gradients
from tests.tiny import tiny_directory, tiny_model
from tests.vision import vision_directory, vision_model


def shard_blocks(model: Any, blocks: Any, **options: Any) -> Any:
    """Shard a model as tutorials do: each block, then the root."""
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


# 6.1: ranks that use different parameters of one unit


def different_experts_plainly(world: World) -> float:
    """Let each rank use its own expert of one unit; return the largest relative error of a gradient."""
    torch.manual_seed(0)
    whole = Toy(Experts())
    toy = fully_shard(copy.deepcopy(whole))
    inputs = [torch.arange(6.0).reshape(2, 3) + rank for rank in range(world.size)]
    toy(inputs[world.rank], world.rank).square().sum().backward()
    sum(whole(inputs[rank], rank).square().sum() / world.size for rank in range(world.size)).backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    return largest_error(whole_gradients(toy), expected)


def naive_experts(lab: Lab) -> Observed:
    error = lab.pool(2).run(different_experts_plainly)[0]
    words = f"no error; the gradients of two experts are added up under one name: relative error {error:.2f}"
    return Observed(error < 1e-6, words, {"error": error})


def ours_experts(lab: Lab) -> Observed:
    errors = []
    for found in lab.pool(2).run(different_experts, "switch"):
        right = {name: torch.as_tensor(value) for name, value in found["expected"].items()}
        errors.append(largest_error({name: torch.as_tensor(found["found"][name]) for name in right}, right))
    words = f"each expert has its own: relative error {max(errors):.0e}"
    return Observed(max(errors) < 1e-6, words, {"error": max(errors)})


# 6.2: images on some ranks


def image_on_one_rank(world: World) -> None:
    """Run a batch that has an image on the first rank only."""
    model = vision_model("qwen2_5_vl").train()
    for block in [*model.model.visual.blocks, *model.model.language_model.layers]:
        fully_shard(block)
    fully_shard(model)
    tokens = torch.arange(2, 18)[None]
    given: dict[str, Any] = {}
    if world.rank == 0:
        config = model.config
        tokens[0, 2:6] = config.image_token_id
        vision = config.vision_config
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        given = {
            "pixel_values": torch.randn(16, width),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (tokens == config.image_token_id).int(),
        }
    model(input_ids=tokens, labels=tokens, use_cache=False, **given).loss.backward()
    dist.barrier()


def naive_images(lab: Lab) -> Observed:
    outcomes = doomed(image_on_one_rank, seconds=8.0)
    words = "; ".join(f"rank {rank}: {first_line(outcome, 70)}" for rank, outcome in enumerate(outcomes))
    return Observed(all(kind == "ok" for kind, _ in outcomes), words, {"outcomes": outcomes})


def ours_images(lab: Lab) -> Observed:
    directory = vision_directory(lab.folder / "qwen2_5_vl", "qwen2_5_vl")
    rows = "a picture in one row of eight"
    expected = oracle(directory, "qwen2_5_vl", rows)
    expected = with_zeros(expected, list(expected["parameters"]))
    ranks = lab.pool(2).run(train, tree(directory, {"tokens_per_micro_batch": 128}, {}), ROWS[rows], 1)
    errors = [error_of_gradients(found, expected) for found in ranks]
    words = (
        f"trains; gradients of {len(expected['gradients'][0])} tensors within {max(errors):.0e} of plain transformers"
    )
    return Observed(max(errors) < 1e-10, words, {"error": max(errors)})


def error_of_gradients(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference of a first gradient, over the largest element of all."""
    first = expected["gradients"][0]
    assert set(found["gradients"][0]) == set(first)
    scale = max(float(abs(gradient).max()) for gradient in first.values())
    return max(float(abs(found["gradients"][0][name] - gradient).max()) for name, gradient in first.items()) / scale


# 6.4: what a loss is divided by


def average_naively(world: World, form: str) -> float:
    """Train one update of two micro-batches per rank on uneven answers; return the largest relative error."""
    whole = tiny_model("llama").double()
    model = shard_blocks(copy.deepcopy(whole), ())
    tokens = torch.randint(2, 90, (4, 16), generator=torch.Generator().manual_seed(3))
    trained = (2, 14, 5, 9)

    def summed(run: nn.Module, row: int) -> Tensor:
        logits = run(input_ids=tokens[row : row + 1], use_cache=False).logits[0, :-1]
        answer = slice(15 - trained[row], 15)
        return nn.functional.cross_entropy(logits[answer], tokens[row, 1:][answer], reduction="sum")

    (sum(summed(whole, row) for row in range(4)) / sum(trained)).backward()
    mine = (2 * world.rank, 2 * world.rank + 1)
    for row in mine:
        divisor = trained[row] * len(mine) if form == "micro-batch" else sum(trained[each] for each in mine)
        (summed(model, row) / divisor).backward()
    expected = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}
    return largest_error(whole_gradients(model), expected)


def naive_average(lab: Lab) -> Observed:
    errors = {form: lab.pool(2).run(average_naively, form)[0] for form in ("micro-batch", "rank")}
    words = (
        f"no error; relative error of gradients {errors['micro-batch']:.2f} with a mean per micro-batch, "
        f"{errors['rank']:.2f} with a mean per rank"
    )
    return Observed(max(errors.values()) < 1e-6, words, errors)


def ours_average(lab: Lab) -> Observed:
    directory = str(tiny_directory(lab.folder / "llama", "llama", tie_word_embeddings=True))
    expected = reference(
        tiny_model("llama", tie_word_embeddings=True).double(), [examples()[:8]], by_hand("token_mean"), 0.1
    )
    errors = {}
    for ranks, budget in ((1, 4096), (2, 64)):
        config = settings(directory, data={"tokens_per_micro_batch": budget})
        found = lab.pool(ranks).run(train, config, rows_of(24), 1)[0]
        errors[ranks, int(found["micro_batches"][0])] = error_of_gradients(found, expected)
    words = "; ".join(
        f"{ranks} rank{'s' * (ranks > 1)} x {count:.0f} micro-batches: {error:.0e}"
        for (ranks, count), error in errors.items()
    )
    return Observed(max(errors.values()) < 1e-10, f"error against plain transformers: {words}", {"errors": errors})


# 6.11: a loss that is not finite on one rank


def one_bad_loss(world: World) -> dict[str, Any]:
    """Let the loss of the first rank be NaN, clip, and make the step as loops do."""
    model = shard_blocks(tiny_model("llama"), ())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(2, 18)[None]
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    (loss * (float("nan") if world.rank == 0 else 1.0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    spoilt = [bool(full_tensor(value.detach()).isnan().any()) for value in model.parameters()]
    return {"norm": float(full_tensor(norm)), "spoilt": sum(spoilt), "of": len(spoilt)}


def naive_nan(lab: Lab) -> Observed:
    ranks = lab.pool(2).run(one_bad_loss)
    words = f"{ranks[1]['spoilt']} of {ranks[1]['of']} weights are NaN on the rank whose loss was fine; no error"
    return Observed(ranks[1]["spoilt"] == 0, words, {"ranks": ranks})


def ours_nan(lab: Lab) -> Observed:
    directory = str(tiny_directory(lab.folder / "llama", "llama"))
    ranks = lab.pool(2).run(poisoned_steps, directory, [1])
    words = f"step 2 is skipped on both ranks, counted ({ranks[0]['skipped'][-1]:.0f}), and training goes on"
    holds = all(
        rank["skipped"] == [0.0, 1.0, 1.0, 1.0] and rank["moved"] == [True, False, True, True] for rank in ranks
    )
    return Observed(holds, words, {"ranks": ranks})


# 6.12: the norm of gradients in host memory


def clip_in_host_memory(world: World) -> dict[str, Any]:
    """Clip as loops do where parameters are offloaded; then over a group that serves the accelerator only, as NCCL."""
    whole = tiny_model("llama")
    model = shard_blocks(copy.deepcopy(whole), (), offload_policy=CPUOffloadPolicy(pin_memory=False))
    tokens = torch.arange(2, 18)[None]
    for each in (whole, model):
        each(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
    mesh = DeviceMesh.from_group(dist.new_group(backend="cuda:gloo"), "cpu")
    offloaded = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False))
    offloaded.grad = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
    try:
        torch.nn.utils.clip_grad_norm_([offloaded], 1.0)
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    return {"norm": float(full_tensor(norm)), "expected": float(expected), "error": error}


def naive_norm(lab: Lab) -> Observed:
    ranks = lab.pool(2).run(clip_in_host_memory)
    words = (
        f"over a group that has a backend for CUDA alone, gradients in host memory cannot be clipped: "
        f"{ranks[0]['error']!r}; over gloo the norm is right ({ranks[0]['norm']:.6f})"
    )
    return Observed(not any(rank["error"] for rank in ranks), words, {"ranks": ranks})


def ours_norm(lab: Lab) -> Observed:
    directory = str(tiny_directory(lab.folder / "llama", "llama", tie_word_embeddings=True))
    model = tiny_model("llama", tie_word_embeddings=True).double()
    expected = reference(model, [examples()[:8]], by_hand("token_mean"), 0.1)["norms"][0]
    config = settings(directory, parallel={"cpu_offload": True}, optim={"clip_norm": 0.01})
    ranks = lab.pool(2).run(train, config, rows_of(24), 1)
    start = {name: value.detach().numpy() for name, value in tiny_parameters().items()}
    moved = [
        sum(float(((rank["parameters"][name] - value) ** 2).sum()) for name, value in start.items()) ** 0.5 / 0.1
        for rank in ranks
    ]
    told = [rank["norms"][0] for rank in ranks]
    words = (
        f"offloaded, both ranks say {told[0]:.6f}, plain transformers {expected:.6f}; clipped to 0.01: {moved[0]:.6f}"
    )
    holds = all(abs(each / expected - 1) < 1e-10 for each in told) and all(
        abs(each / 0.01 - 1) < 1e-6 for each in moved
    )
    return Observed(holds, words, {"told": told, "expected": expected, "moved": moved})


def tiny_parameters() -> dict[str, Tensor]:
    """Return the weights that the offloaded run starts from."""
    return dict(tiny_model("llama", tie_word_embeddings=True).double().named_parameters())
