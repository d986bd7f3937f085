"""How torch_2_6.tar.xz was written: rank files of DTensors, two copies of two shards, by torch 2.6.0 on CPU ranks.

torchrun --nproc-per-node 4 tests/features/rescue/torch_2_6.py OUT        (RESCUE_TORCH_2_6=1 tools/test_rescue.sh)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def write(out: Path) -> None:
    """Write two steps of AdamW as verl lays them, and beside them truth.pt."""
    dist.init_process_group("gloo")
    mesh, placements = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp")), [Replicate(), Shard(0)]
    torch.manual_seed(0)
    whole = {"0.weight": torch.randn(5, 6), "0.bias": torch.randn(5), "1.weight": torch.randn(4, 5)}
    gradients = {name: torch.randn_like(value) for name, value in whole.items()}
    parameters = {name: torch.nn.Parameter(distribute_tensor(value, mesh, placements)) for name, value in whole.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    for _ in range(2):
        for name, parameter in parameters.items():
            parameter.grad = distribute_tensor(gradients[name], mesh, placements)
        optimizer.step()
    actor, end = out / "checkpoint" / "global_step_2" / "actor", f"world_size_4_rank_{dist.get_rank()}.pt"
    actor.mkdir(parents=True, exist_ok=True)
    state = {name: parameter.data for name, parameter in parameters.items()}
    torch.save(state, actor / f"model_{end}")
    torch.save(optimizer.state_dict(), actor / f"optim_{end}")
    rest = {"lr_scheduler": {"last_epoch": 2}, "rng": {"cpu": torch.get_rng_state()}}
    torch.save(rest, actor / f"extra_state_{end}")
    states = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
    truth = {
        "model": {name: full(value) for name, value in state.items()},
        "optim": {name: {slot: full(value) for slot, value in slots.items()} for name, slots in states.items()},
    }
    if dist.get_rank() == 0:
        torch.save(truth, out / "truth.pt")
    dist.barrier()


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


if __name__ == "__main__":
    write(Path(sys.argv[1]))
