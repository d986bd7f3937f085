"""Other systems' checkpoints: how long headers of a 70B model take, and what an import costs beside a plain copy.

    python benchmarks/rescue.py [headers] [import]

headers   weights and two moments of a Llama of 70B parameters in rank files of 8 ranks, whose storages are holes:
          written by torch.save without its data. Target: `checkpoint check --level headers` in less than 5 CPU seconds,
          Python's start and imports included.
import    a DCP directory of 0.5 GB; a plain copy reads every file and writes it with fsync. Arms alternate; on a disk
          wall seconds count, and the median of all pairs. Target: 1.5 times its time, and at most two tensors of memory
          beyond the process before. A copy that verifies as much as an import, and what each pass over the bytes
          costs, are printed beside it.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from measure import ENVIRONMENT, Round, show_round
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from verdicts import Verdicts

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
    """Read every file and write it, with fsync; nothing is verified."""
    target.mkdir()
    for file in source.iterdir():
        with file.open("rb") as read, (target / file.name).open("wb") as written:
            shutil.copyfileobj(read, written, 2**22)
            written.flush()
            os.fsync(written.fileno())


def _verified_copy(source: Path, target: Path) -> None:
    """The same, each byte verified as an import does: the source's CRC-32, a hash of what is written and read back."""
    from holdfast.checkpoint.place.hashing import hash_file

    target.mkdir()
    block = memoryview(bytearray(2**20))
    for file in source.iterdir():
        digest, checksum = xxhash.xxh3_128(), 0
        with file.open("rb", buffering=0) as read, (target / file.name).open("wb", buffering=0) as written:
            while count := read.readinto(block):
                checksum = zlib.crc32(block[:count], checksum)
                digest.update(block[:count])
                written.write(block[:count])
            os.fsync(written.fileno())
        assert hash_file(target / file.name) == digest.hexdigest()


def _import(source: Path, target: Path) -> None:
    """Do what an import does with tensors: read, hash, write and verify; the rest of it does not grow with them."""
    from holdfast.checkpoint.format.manifest import About
    from holdfast.checkpoint.format.snapshot import MODEL, Snapshot
    from holdfast.checkpoint.format.verification import verify_checkpoint
    from holdfast.checkpoint.place.storage import open_storage
    from holdfast.checkpoint.saving.writer import commit
    from holdfast.features.rescue.reading.recognise import open_foreign
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


IMPORT_ARMS: dict[str, Callable[[Path, Path], None]] = {
    "copy": _copy,
    "verified copy": _verified_copy,
    "import": _import,
}
COUNT, SIDE, PAIRS, ROUNDS = 32, 2000, 10, 3


def imports() -> bool:
    """Measure an import of tensors beside a plain copy."""
    with tempfile.TemporaryDirectory(prefix="rescue-", dir=".") as folder:
        source = Path(folder) / "source"
        tensors = {f"layer.{at}.weight": torch.randn(SIDE, SIDE) for at in range(COUNT)}
        dcp.save({"model": tensors, "step": 1}, checkpoint_id=str(source), no_dist=True)
        del tensors
        for act in IMPORT_ARMS.values():  # fresh memory and fresh pages of the cache are dearer than used ones
            act(source, Path(folder) / "first")
            shutil.rmtree(Path(folder) / "first")
        rounds = [_import_round(number, source, Path(folder) / "target") for number in range(ROUNDS)]
        memory = {ranks: _memory_of_an_import(Path(folder) / f"memory-{ranks}", ranks) for ranks in (1, 2)}
    verdicts = Verdicts(rounds)
    size = COUNT * SIDE**2 * 4
    verdicts.at_most_over_all(
        1.5, f"an import of {size / 1e9:.2f} GB over a plain copy, wall", "import", "copy", "wall"
    )
    cpu = {name: median(value for turn in rounds for value in turn[name]["cpu"]) for name in IMPORT_ARMS}
    print(
        f"CPU of an import over a copy that verifies as much: {cpu['import'] / cpu['verified copy']:.2f}; over a plain "
        f"one {cpu['import'] / cpu['copy']:.2f}, of which a verified copy is {cpu['verified copy'] / cpu['copy']:.2f}"
    )
    _show_passes()
    for ranks, extra in memory.items():
        print(f"memory of an import beyond its process, files of {ranks} rank(s): {extra:.2f} tensors of 64 MB")
    return not verdicts.missed and max(memory.values()) <= 2


def _import_round(number: int, source: Path, target: Path) -> Round:
    said: Round = {name: {"wall": [], "cpu": []} for name in IMPORT_ARMS}
    for pair in range(PAIRS):
        for name in IMPORT_ARMS if pair % 2 else reversed(IMPORT_ARMS):
            _measure(IMPORT_ARMS[name], source, target, said[name])
    show_round(number, {name: {key: median(seconds) for key, seconds in each.items()} for name, each in said.items()})
    return said


def _show_passes() -> None:
    """Print what one pass over the same bytes costs: an import makes one of each, and three of the hash."""
    numbers = torch.randn(COUNT * SIDE**2)
    data = numbers.numpy().data.cast("B")
    passes: dict[str, Callable[[], object]] = {
        "CRC-32 of the source's archive": lambda: zlib.crc32(data),
        "xxh3-128 (of each tensor, of the file, of the file read back)": lambda: xxhash.xxh3_128_digest(data),
        "least and largest number (NaN)": lambda: torch.aminmax(numbers),
    }
    for name, act in passes.items():
        began = time.process_time()
        act()
        print(f"one pass, {name}: {time.process_time() - began:.3f} CPU s")


def _measure(act: Callable[[Path, Path], None], source: Path, target: Path, said: dict[str, list[float]]) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    act(source, target)
    said["wall"].append(time.perf_counter() - wall)
    said["cpu"].append(time.process_time() - cpu)
    shutil.rmtree(target)


def _memory_of_an_import(folder: Path, ranks: int) -> float:
    """Return by how many tensors a process grows that imports files of so many ranks, once small ones went that way."""
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); from pathlib import Path\n"
        "import rescue; from measure import Meter\n"
        "folder, ranks = Path(sys.argv[1]), int(sys.argv[2])\n"
        "rescue.write_shards(folder / 'small', ranks, 64); rescue._import(folder / 'small', folder / 'warm')\n"
        "meter = Meter(); meter.begin_peak(); rescue._import(folder / 'large', folder / 'measured')\n"
        "print(meter.peak_mib() * 2**20 / (4 * 4000**2))\n"
    )
    write_shards(folder / "large", ranks, 4000)
    command = [sys.executable, "-W", "ignore", "-c", code, str(folder), str(ranks)]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


def write_shards(folder: Path, ranks: int, side: int) -> None:
    """Write twelve square matrices as DCP does from so many ranks."""
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        mesh = DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=("fsdp",))
        local = {f"layer.{at}.weight": torch.randn(side // ranks, side) for at in range(12)}
        weights = {name: DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for name, value in local.items()}
        place = folder / "global_step_1" / "actor"
        place.mkdir(parents=True, exist_ok=True)
        torch.save(weights, place / f"model_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["headers", "import"]
    results = [{"headers": headers, "import": imports}[name]() for name in chosen]
    sys.exit(0 if all(results) else 1)
