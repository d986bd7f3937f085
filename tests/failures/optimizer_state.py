"""Cases about what an optimizer remembers: what is saved, what comes back, and in which dtype."""

from __future__ import annotations

import enum
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from holdfast import checkpoint
from holdfast.optim.state import UnsavableOptimizer
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part
from tests.checkpoint.cases import build, contents, load_into_other, mixed_dtypes, optimizer_of, step
from tests.failures.lab import Lab, Observed, first_line


def sharded_linear(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return one linear layer as plain FSDP2 shards it."""
    torch.manual_seed(seed)
    return fully_shard(nn.Linear(8, 8, dtype=dtype))


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Return AdamW over everything that a model has, as most loops build it."""
    return torch.optim.AdamW(model.parameters(), **({"lr": 1e-3} | options))


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one step on fixed inputs."""
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 8, dtype=dtype)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def resume_like_the_tutorial(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """Load an optimizer as torch's tutorial does: its live state is the target, then it is set."""
    wanted = StateDictOptions(**options)
    state = {"optim": get_optimizer_state_dict(model, optimizer, options=wanted)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state["optim"], options=wanted)


class Branches(nn.Module):
    """Two layers, of which one is called."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)  # type: ignore[no-any-return]


# 1: frozen parameters in the optimizer


def save_with_touched_state(world: World) -> None:
    """Move state between host and device in the loop that five trainers share, then save a frozen tower under FSDP1."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("language", nn.Linear(16, 16, dtype=torch.bfloat16))
    model.add_module("visual", nn.Linear(16, 16, dtype=torch.bfloat16).requires_grad_(False))
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = adamw(model)
    model(torch.ones(2, 16, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state[parameter].values():  # a defaultdict: indexing makes an empty entry
                value.to("cpu")
    get_optimizer_state_dict(model, optimizer)


def load_touched_state(world: World) -> dict[str, float]:
    """Touch the state of a layer that was never called, save whole and load under FSDP2; return the steps loaded."""
    whole = StateDictOptions(full_state_dict=True)
    model = fully_shard(Branches())
    optimizer = adamw(model)
    update(model, optimizer)
    for parameter in model.parameters():
        optimizer.state[parameter]
    saved = get_optimizer_state_dict(model, optimizer, options=whole)
    other = fully_shard(Branches())
    resumed = adamw(other)
    set_optimizer_state_dict(other, resumed, saved, options=whole)
    names = {parameter: name for name, parameter in other.named_parameters()}
    return {names[parameter]: float(state["step"]) for parameter, state in resumed.state.items()}


def naive_frozen(lab: Lab) -> Observed:
    outcomes = lab.pool(2).outcomes(save_with_touched_state, timeout_seconds=300.0)
    errors = [("ok", "") if ok else (said[0], said[1]) for ok, said in outcomes]
    steps = lab.pool(2).run(load_touched_state)[0]
    said = "; ".join(f"rank {rank}: {first_line(error, 66)}" for rank, error in enumerate(errors))
    words = (
        f"FSDP1 cannot save: {said}. FSDP2 can, and a layer that was never called comes back with "
        f"step={steps.get('never.weight', 0):.0f}, no error"
    )
    holds = all(kind == "ok" for kind, _ in errors) and "never.weight" not in steps
    return Observed(holds, words, {"errors": errors, "steps": steps})


def save_poisoned(world: World, path: str) -> dict[str, Any]:
    """Train, make state of mixed dtypes, touch every entry, save; return what was saved."""
    toy = build(world)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, 0)
    mixed_dtypes(optimizer)
    for parameter in toy.parameters():
        optimizer.state[parameter]
    entries = [len(state) for state in optimizer.state.values()]
    before = contents(toy, optimizer)
    checkpoint.save(path, toy, optimizer)
    same = contents(toy, optimizer) == before and [len(state) for state in optimizer.state.values()] == entries
    return {"contents": before, "untouched": same, "empty": entries.count(0)}


def ours_frozen(lab: Lab) -> Observed:
    path = lab.path("frozen/step-00000001")
    saved = lab.pool(2).run(save_poisoned, path)[0]
    equal = []
    for ranks in (2, 1):
        for found in lab.pool(ranks).run(load_into_other, path):
            equal.append({name: found[name] for name in found if "extra" not in name} == saved["contents"])
    state = [name for name in saved["contents"] if "/" in name]
    numbers = {"state": sorted(state), "empty": saved["empty"], "untouched": saved["untouched"], "equal": equal}
    words = (
        f"saved past {saved['empty']} empty entries; {len(state)} values of state, 3 dtypes, equal bit for bit on 2 "
        "ranks and on 1"
    )
    return Observed(saved["untouched"] and all(equal), words, numbers)


# 2: values that a state dict may hold


class Mode(enum.Enum):
    """An option as an optimizer may keep it."""

    FAST = 1


VALUES: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "Size": torch.Size([2, 3]),
    "set": {1, 2},
    "complex": 1j,
    "None": None,
    "bool": True,
    "str": "bfloat16",
    "bytes": b"\x00x",
    "tuple": ((0.9, 0.95), 2),
    "float64": np.float64(0.1),
    "tensor": torch.tensor(1e-3),
}
UNSAVABLE: dict[str, Any] = {"Enum": Mode.FAST, "function": len}
FORMS = {
    "sharded": {},
    "cpu_offload": {"cpu_offload": True},
    "cpu_offload, strict=False": {"cpu_offload": True, "strict": False},
    "full_state_dict": {"full_state_dict": True},
}


def take_every_value(world: World) -> dict[str, dict[str, str]]:
    """Return, by form and kind of value, what torch's own state dict says of it."""
    found: dict[str, dict[str, str]] = {}
    model = sharded_linear()
    for form, options in FORMS.items():
        found[form] = {}
        for kind, value in (VALUES | UNSAVABLE).items():
            optimizer = adamw(model)
            optimizer.param_groups[0]["extra"] = value
            update(model, optimizer)
            try:
                groups = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))["param_groups"]
                found[form][kind] = "" if type(groups[0]["extra"]) is type(value) else type(groups[0]["extra"]).__name__
            except ValueError as error:
                found[form][kind] = str(error)
    return found


def drop_unknown_state(world: World, path: str) -> bool:
    """Save state under a key that a fresh optimizer does not have; return whether it comes back."""
    model = sharded_linear()
    optimizer = adamw(model)
    update(model, optimizer)
    for parameter, state in optimizer.state.items():
        state["average"] = torch.ones_like(parameter)
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    resumed = adamw(model)
    resume_like_the_tutorial(path, model, resumed)
    return all("average" in state for state in resumed.state.values())


def naive_values(lab: Lab) -> Observed:
    found = lab.pool(2).run(take_every_value)[0]
    kept = lab.pool(2).run(drop_unknown_state, lab.path("unknown"))[0]
    refused = {
        form: sorted(kind for kind, said in kinds.items() if "Unexpected" in said) for form, kinds in found.items()
    }
    words = (
        f"{found['cpu_offload']['dtype']!r} with cpu_offload or full_state_dict, strict=False or not; so are "
        f"{len(refused['cpu_offload'])} of {len(VALUES | UNSAVABLE)} kinds of value; a tensor of state that a fresh "
        f"optimizer lacks is {'kept' if kept else 'dropped, no error'}"
    )
    numbers = {"said": found, "refused": refused, "kept": kept}
    return Observed(not refused["cpu_offload"] and kept, words, numbers)


def keep_every_value(world: World, path: str) -> dict[str, Any]:
    """Save every value in a group and in state, load into an optimizer that has others, compare type and value."""
    toy = build(world)
    optimizer = optimizer_of(toy)
    optimizer.param_groups[0] |= VALUES
    step(world, toy, optimizer, 0)
    for state in optimizer.state.values():
        state |= {f"my {kind}": value for kind, value in VALUES.items() if not isinstance(value, Tensor)}
        state["my average"] = state["exp_avg"] + 1.0
    checkpoint.save(path, toy, optimizer)
    other = build(world, seed=1)
    restored = optimizer_of(other, lr=0.7)
    restored.param_groups[0] |= dict.fromkeys(VALUES, "something else")
    checkpoint.load(path, other, restored, hyperparameters="checkpoint")
    group = restored.param_groups[0]
    same = {kind: type(group[kind]) is type(value) and bool(group[kind] == value) for kind, value in VALUES.items()}
    for state in restored.state.values():
        for kind, value in VALUES.items():
            if not isinstance(value, Tensor):
                same[f"my {kind}"] = type(state[f"my {kind}"]) is type(value) and state[f"my {kind}"] == value
        same["my average"] = torch.equal(local_part(state["my average"]), local_part(state["exp_avg"]) + 1.0)
    return {"same": same, "lr": group["lr"]}


def refuse_values(world: World, folder: str) -> dict[str, str]:
    """Rehearse with a value that has no written form; return what is said."""
    said = {}
    for kind, value in UNSAVABLE.items():
        toy = build(world)
        optimizer = optimizer_of(toy)
        optimizer.param_groups[0]["extra"] = value
        try:
            checkpoint.rehearse(folder, toy, optimizer)
        except UnsavableOptimizer as error:
            said[kind] = str(error)
    return said


def ours_values(lab: Lab) -> Observed:
    kept = lab.pool(2).run(keep_every_value, lab.path("values/step-00000001"))
    said = lab.pool(2).run(refuse_values, lab.path("values"))
    same = kept[0]["same"]
    words = (
        f"{sum(same.values())} of {len(same)} values in groups and state come back with type and value; "
        f"{' and '.join(UNSAVABLE)} are refused by the rehearsal, before step 1, on both ranks"
    )
    holds = all(all(rank["same"].values()) for rank in kept) and all(set(rank) == set(UNSAVABLE) for rank in said)
    return Observed(holds, words, {"same": same, "lr": kept[0]["lr"], "said": said})
