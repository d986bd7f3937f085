"""Other systems' checkpoints: how long headers of a 70B model take, and what an import costs beside a plain copy.

    python benchmarks/rescue.py [headers] [import] [saves]

headers   weights and two moments of a Llama of 70B parameters in rank files of 8 ranks, whose storages are holes:
          written by torch.save without its data. Target: `checkpoint check --level headers` in less than 5 CPU seconds,
          Python's start and imports included.
import    a DCP directory of 0.5 GB; a plain copy reads every file and writes it with fsync. Arms alternate.
          Target: 1.5 times its time, and at most two tensors of memory beyond the process before.
saves     the plug-in in a transformers Trainer beside the Trainer's own sharded save, verified. Target: 1.25 times.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

RANKS = 8
HIDDEN, INNER, KEYS, LAYERS, WORDS = 8192, 28672, 1024, 80, 128256


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the parameters of a Llama of 70B."""
    layer = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (KEYS, HIDDEN),
        "self_attn.v_proj.weight": (KEYS, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    inner = {f"model.layers.{at}.{name}": shape for at in range(LAYERS) for name, shape in layer.items()}
    outer = {"model.norm.weight": (HIDDEN,), "lm_head.weight": (WORDS, HIDDEN)}
    return {"model.embed_tokens.weight": (WORDS, HIDDEN), **inner, **outer}


def write_rank_files(folder: Path) -> None:
    """Write rank files as EasyR1 lays them out, the numbers being holes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    actor = folder / "global_step_10" / "actor"
    actor.mkdir(parents=True)
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        mesh = DeviceMesh("cpu", list(range(RANKS)), mesh_dim_names=("fsdp",))

        def shard(shape: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh = mesh) -> DTensor:
            local = torch.empty(shape[0] // RANKS, *shape[1:], dtype=dtype)
            return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

        with torch.serialization.skip_data():  # tensors that nobody writes to take addresses and no memory
            weights = {name: shard(shape, torch.bfloat16) for name, shape in shapes().items()}
            torch.save(weights, actor / f"model_world_size_{RANKS}_rank_{rank}.pt")
            state = {
                name: {key: shard(shape, torch.float32) for key in ("exp_avg", "exp_avg_sq")}
                for name, shape in shapes().items()
            }
            group = {"params": list(state), "lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
            torch.save({"state": state, "param_groups": [group]}, actor / f"optim_world_size_{RANKS}_rank_{rank}.pt")
        extra = {"lr_scheduler": {"last_epoch": 10}, "rng": {"cpu": torch.get_rng_state()}}
        torch.save(extra, actor / f"extra_state_world_size_{RANKS}_rank_{rank}.pt")
        dist.destroy_process_group()
    (folder / "checkpoint_tracker.json").write_text('{"last_global_step": 10}')


def headers() -> bool:
    """Measure the check of headers."""
    with tempfile.TemporaryDirectory(prefix="rescue-") as folder:
        write_rank_files(Path(folder))
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        command = [sys.executable, "-m", "holdfast.cli.main", "checkpoint", "check", folder, "--level", "headers"]
        seconds, outputs = [], ""
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            outputs = done.stdout + done.stderr
    print(outputs)
    print(
        f"headers of {size / 1e9:.0f} GB on {RANKS} ranks: {median(seconds):.2f} CPU s "
        f"({min(seconds):.2f} to {max(seconds):.2f})"
    )
    return median(seconds) < 5 and "whole" in outputs


def _copy(source: Path, target: Path) -> None:
    import os

    target.mkdir()
    for file in source.iterdir():
        with file.open("rb") as read, (target / file.name).open("wb") as written:
            shutil.copyfileobj(read, written, 2**22)
            written.flush()
            os.fsync(written.fileno())


def _import(source: Path, target: Path) -> None:
    """Do what an import does with tensors: read, hash, write and verify; the rest of it does not grow with them."""
    from holdfast.checkpoint.foreign.recognise import open_foreign
    from holdfast.checkpoint.format.manifest import About
    from holdfast.checkpoint.format.snapshot import MODEL, Snapshot
    from holdfast.checkpoint.format.verification import verify_checkpoint
    from holdfast.checkpoint.place.storage import open_storage
    from holdfast.checkpoint.save.writer import commit
    from holdfast.parallel.collectives import RankGroup

    checkpoint = open_foreign(source)
    planned = {MODEL + name: value for name, value in checkpoint.weights.items()}
    snapshot = Snapshot(
        tensors={name: torch.zeros((), dtype=each.dtype).expand(each.shape) for name, each in planned.items()},
        trained=frozenset(planned), ties={}, optimizer=None, rank_state={}, shared={},
        readers={name: each.read for name, each in planned.items()},
    )  # fmt: skip
    target.mkdir()
    storage = open_storage(str(target))
    commit(snapshot, storage, About(run_id="", step=1), RankGroup(), name="step-00000001")
    verify_checkpoint(storage, "step-00000001", "files")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def imports() -> bool:
    """Measure an import of tensors beside a plain copy."""
    count, largest = 32, 4_000_000
    with tempfile.TemporaryDirectory(prefix="rescue-", dir=".") as folder:
        source = Path(folder) / "source"
        tensors = {f"layer.{at}.weight": torch.randn(2000, 2000) for at in range(count)}
        dcp.save({"model": tensors, "step": 1}, checkpoint_id=str(source), no_dist=True)
        del tensors
        ratios = []
        for round_number in range(7):
            times: dict[str, float] = {}
            arms: list[tuple[str, Callable[[Path, Path], None]]] = [("copy", _copy), ("import", _import)]
            for name, act in arms if round_number % 2 else reversed(arms):
                target = Path(folder) / name
                began = time.perf_counter()
                act(source, target)
                times[name] = time.perf_counter() - began
                shutil.rmtree(target)
            ratios.append(times["import"] / times["copy"])
        memory = _memory_of_an_import(source, Path(folder))
    extra = memory / (4 * largest)
    print(
        f"import / plain copy of {count * largest * 4 / 1e9:.2f} GB: {median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )
    print(f"memory beyond the process before: {extra:.2f} tensors of {4 * largest / 1e6:.0f} MB")
    return median(ratios) <= 1.5 and extra <= 2


def _memory_of_an_import(source: Path, folder: Path) -> float:
    """Return by how many bytes a process grows that imports, once small tensors went the same way."""
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); from pathlib import Path; import torch, rescue\n"
        "import torch.distributed.checkpoint as dcp\n"
        "folder = Path(sys.argv[2])\n"
        "dcp.save({'model': {'a': torch.ones(4)}, 'step': 1}, checkpoint_id=str(folder / 'small'), no_dist=True)\n"
        "rescue._import(folder / 'small', folder / 'warm'); before = rescue._peak()\n"
        "rescue._import(Path(sys.argv[1]), folder / 'measured'); print(rescue._peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(source), str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def saves() -> bool:
    """Measure the plug-in's saves in a Trainer beside the Trainer's own."""
    script = Path("tests/integrations/trainer_script.py")
    ratios = []
    for round_number in range(5):
        seconds = {}
        for arm in (["plain"], []) if round_number % 2 else ([], ["plain"]):
            with tempfile.TemporaryDirectory(prefix="rescue-", dir=".") as folder:
                seconds["plain" if arm else "ours"] = _seconds_of_saves(script, folder, arm)
        ratios.append(seconds["ours"] / seconds["plain"])
    print(f"saves of the plug-in / the Trainer's own: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return median(ratios) <= 1.25


def _seconds_of_saves(script: Path, folder: str, arm: list[str]) -> float:
    command: list[Any] = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
                          script, folder, "wide", "timed", *arm]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return float(next(line for line in done.stdout.splitlines() if line.startswith("saves took")).split()[-1])


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["headers", "import", "saves"]
    results = [{"headers": headers, "import": imports, "saves": saves}[name]() for name in chosen]
    sys.exit(0 if all(results) else 1)
