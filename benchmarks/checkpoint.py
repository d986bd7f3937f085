"""What verification costs: saves, loads and exports against plain torch on the same state, 2 gloo ranks.

    python benchmarks/checkpoint.py [--rounds 3] [--disk FOLDER] [--memory /dev/shm]

Every round runs both arms of each pair in the same processes, ten times in alternating order; the median of the ten
ratios is the round's. On a disk wall seconds count, since the disk is the work, and the median of all pairs is compared
with the target: others use the disk, too, and it stops now and then for longer than a round. On a memory file system
CPU seconds count, and the worst round. Both arms of an export, twenty pairs a round, write under new names, and what
they wrote is deleted untimed. Cold reads drop files from the page cache first. What an arm leaves to Python's garbage
collector is collected before the next one starts. The state is a model of 67M parameters with AdamW moments, 0.8 GB
over both ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import ENVIRONMENT, Meter, Round, heading, show_round
from verdicts import Verdicts

ROUNDS, PAIRS = 3, 10


def build() -> tuple[Any, Any]:
    """Return a sharded module and its optimizer, with state."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(64)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def cool(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Arms:
    """Both ways of everything, on one rank."""

    def __init__(self, place: Path) -> None:
        import torch.distributed as dist

        from holdfast.parallel.collectives import RankGroup

        self.place = place
        self.model, self.optimizer = build()
        self.ranks = RankGroup()
        self.first = dist.get_rank() == 0
        self.group = self.ranks.group
        self.number = 0
        self.made: list[Path] = []

    def forget(self) -> None:
        """Delete what was saved on the way, and wait for the disk, so that nobody pays for another's work."""
        import torch.distributed as dist

        dist.barrier()
        if self.first:
            for folder in self.made:
                shutil.rmtree(folder, ignore_errors=True)
            os.sync()
        self.made.clear()
        dist.barrier()

    def cool(self, *folders: Path) -> None:
        """Drop folders from the page cache."""
        import torch.distributed as dist

        dist.barrier()
        if self.first:
            for folder in folders:
                cool(folder)
        dist.barrier()

    def state(self) -> dict[str, Any]:
        from holdfast.checkpoint.format.snapshot import take

        return dict(take(self.model, self.optimizer).tensors)

    def fresh(self, name: str) -> Path:
        self.number += 1
        self.made.append(self.place / f"{name}-{self.number}")
        return self.made[-1]

    def dcp_save(self, folder: Path) -> None:
        from torch.distributed.checkpoint import FileSystemWriter, save

        save(self.state(), storage_writer=FileSystemWriter(folder, overwrite=False), process_group=self.group)

    def our_save(self, folder: Path) -> None:
        from holdfast.checkpoint.format.manifest import About
        from holdfast.checkpoint.format.snapshot import take
        from holdfast.checkpoint.place.storage import LocalStorage
        from holdfast.checkpoint.saving.writer import commit

        snapshot = take(self.model, self.optimizer)
        commit(snapshot, LocalStorage(folder.parent), About(run_id="b", step=0), self.ranks, name=folder.name)

    def dcp_load(self, folder: Path) -> None:
        from torch.distributed.checkpoint import FileSystemReader, load

        load(self.state(), storage_reader=FileSystemReader(folder), process_group=self.group)

    def our_load(self, folder: Path) -> None:
        from holdfast.checkpoint.loading.reader import load_state
        from holdfast.checkpoint.place.storage import LocalStorage

        load_state(LocalStorage(folder.parent), folder.name, self.model, self.optimizer, self.ranks)

    def verify(self, folder: Path) -> None:
        from holdfast.checkpoint.format.verification import verified_manifest
        from holdfast.checkpoint.place.storage import LocalStorage

        verified_manifest(LocalStorage(folder.parent), folder.name, self.ranks)

    def read(self, folder: Path) -> None:
        """Read this rank's share of the files, as `verify` deals them out."""
        import torch.distributed as dist

        files = sorted(path for path in folder.rglob("*") if path.is_file())
        buffer = bytearray(2**22)
        for path in files[dist.get_rank() :: dist.get_world_size()]:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def clone(self) -> None:
        from holdfast.parallel.shards import local_part

        self.copies = [local_part(tensor).clone() for tensor in self.state().values()]

    def stage(self) -> None:
        from holdfast.checkpoint.format.snapshot import staged, take

        self.buffers: dict[str, Any] = getattr(self, "buffers", {})
        staged(take(self.model, self.optimizer), self.buffers)


class Exporter:
    """A sharded language model, and the same bytes written by nobody in particular."""

    LLAMA = {  # noqa: RUF012 - never changed
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 12, "tie_word_embeddings": False,
    }  # fmt: skip

    def __init__(self, place: Path) -> None:
        import torch
        import torch.distributed as dist

        from holdfast.config.load import from_mapping
        from holdfast.config.verbs.training import SFTConfig
        from holdfast.models.setup.model import blueprint
        from holdfast.parallel.collectives import RankGroup
        from holdfast.parallel.failure.channel import FailureChannel
        from holdfast.parallel.mesh import World
        from holdfast.training.run import Run
        from holdfast.training.setup.model import build_policy

        rank, size = dist.get_rank(), dist.get_world_size()
        model = {"config": self.LLAMA, "tokenizer": "builtin:characters"}
        config = from_mapping({"steps": 1, "model": model, "data": {"path": "none"}}, SFTConfig)
        world = World(rank, size, rank, torch.device("cpu"), FailureChannel(dist.HashStore(), rank, size))
        self.place, self.ranks = place, RankGroup()
        self.origin = blueprint(config.model, place, seed=0)
        run = Run(config=config, base=Path.cwd(), world=world, ranks=self.ranks)
        self.policy = build_policy(run, self.origin).module
        sizes = [value.numel() * value.element_size() for value in self.policy.parameters()]
        self.bytes_, self.largest = sum(sizes), max(sizes)

    def export(self) -> None:
        from holdfast.checkpoint.export.card import Papers
        from holdfast.checkpoint.export.write import export

        papers = Papers(texts={"holdfast.yaml": ""})
        export(self.policy, self.origin, self.place / "export", self.ranks, papers=papers)

    def write(self) -> None:
        """Write as many bytes to one file on rank 0, and wait for the disk."""
        import torch.distributed as dist

        if self.ranks.rank == 0:
            block = os.urandom(2**22)
            with (self.place / "raw").open("xb", buffering=0) as file:
                for _ in range(self.bytes_ // len(block)):
                    file.write(block)
                os.fsync(file.fileno())
        dist.barrier()

    def forget(self) -> None:
        if self.ranks.rank == 0:
            (self.place / "raw").unlink(missing_ok=True)
            shutil.rmtree(self.place / "export", ignore_errors=True)


def timed(work: Callable[[], object], clock: Callable[[], float]) -> float:
    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    start = clock()
    work()
    return clock() - start


Arm = tuple[str, Callable[[], object]]


class Stopwatch:
    """Seconds by arm, of every pair; pairs are in alternating order."""

    def __init__(self, swap: bool) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._swap = swap

    def pair(
        self, clock: Callable[[], float], *arms: Arm, after: Callable[[], object] = lambda: None, pairs: int = PAIRS
    ) -> None:
        """Time arms so many times; `after` runs, untimed, after each."""
        for number in range(pairs):
            for name, work in reversed(arms) if (number % 2 == 1) != self._swap else arms:
                self.seconds.setdefault(name, []).append(timed(work, clock))
                after()


def measure(disk: Path, memory: Path, swap: bool) -> dict[str, list[float]]:
    """Return the cost of each arm on this rank, pair by pair."""
    watch, wall, cpu = Stopwatch(swap), time.perf_counter, time.process_time
    on_disk, in_memory = Arms(disk), Arms(memory)
    for arms in (on_disk, in_memory):  # first calls pay for imports and plans
        arms.dcp_save(arms.fresh("warm"))
        arms.our_save(arms.fresh("warm"))
        arms.forget()
    plain, ours = disk / "plain", disk / "ours"
    meter = Meter()
    meter.begin_peak()
    on_disk.our_save(ours)
    watch.seconds["save_extra_mib"] = [meter.peak_mib()]
    on_disk.dcp_save(plain)
    for arms, where, clock in ((on_disk, "disk", wall), (in_memory, "cpu", cpu)):
        watch.pair(
            clock,
            (f"save_{where}_dcp", lambda arms=arms: arms.dcp_save(arms.fresh("dcp"))),
            (f"save_{where}_ours", lambda arms=arms: arms.our_save(arms.fresh("ours"))),
            after=arms.forget,
        )
    on_disk.stage()
    on_disk.clone()
    watch.pair(cpu, ("clone", on_disk.clone), ("stage", on_disk.stage))
    on_disk.dcp_load(plain)
    on_disk.our_load(ours)
    on_disk.cool(plain, ours)
    cool_again = lambda: on_disk.cool(plain, ours)  # noqa: E731
    watch.pair(
        wall, ("read_cold", lambda: on_disk.read(ours)), ("verify_cold", lambda: on_disk.verify(ours)), after=cool_again
    )
    watch.pair(
        wall,
        ("load_cold_dcp", lambda: on_disk.dcp_load(plain)),
        ("load_cold_ours", lambda: on_disk.our_load(ours)),
        after=cool_again,
    )
    watch.seconds["state_mib"] = [sum(part.numel() * part.element_size() for part in on_disk.copies) / 2**20]
    exporter = Exporter(disk)
    exporter.export()  # pays for imports
    exporter.forget()
    watch.pair(wall, ("raw_write", exporter.write), ("export", exporter.export), after=exporter.forget, pairs=2 * PAIRS)
    meter.begin_peak()
    exporter.export()
    watch.seconds["export_extra_mib"] = [meter.peak_mib()]
    watch.seconds["largest_tensor_mib"] = [exporter.largest / 2**20]
    return watch.seconds


def be_rank(disk: Path, memory: Path, swap: bool) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(disk, memory, swap)
    told = {}
    for name, seconds in found.items():
        values = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        told[name] = {"seconds": values.tolist(), "sum": values.sum().item()}
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.destroy_process_group()


def round_of(disk: str, memory: str, swap: bool) -> Round:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = [Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=parent)) for parent in (disk, memory)]
    variables = {**os.environ, **ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    try:
        members = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", *map(str, places), *(["--swap"] if swap else [])],
                env={**variables, "RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]
        output, _ = members[0].communicate()
        if any([member.wait() for member in members]):  # noqa: C419 - all of them, whatever the first says
            sys.exit(f"a round failed:\n{output}")
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
    found: Round = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--memory", default="/dev/shm")
    parser.add_argument("--rank", nargs=2, type=Path)
    parser.add_argument("--swap", action="store_true")
    options = parser.parse_args()
    if options.rank:
        disk, memory = options.rank
        be_rank(disk, memory, options.swap)
        return
    print(heading())
    rounds = []
    for number in range(options.rounds):
        rounds.append(round_of(options.disk, options.memory, number % 2 == 1))
        show_round(number, rounds[-1])
    verdicts = Verdicts(rounds)
    verdicts.at_most_over_all(1.25, "save on a disk over plain DCP, wall", "save_disk_ours", "save_disk_dcp", "seconds")
    verdicts.at_most(1.35, "save in memory over plain DCP, CPU", "save_cpu_ours", "save_cpu_dcp", "seconds")
    verdicts.at_most_over_all(1.30, "verify over a cold read, wall", "verify_cold", "read_cold", "seconds")
    verdicts.at_most(1.50, "copy of a background save over a clone, CPU", "stage", "clone", "seconds")
    verdicts.at_most_over_all(
        1.30, "load and verify over DCP load, cold, wall", "load_cold_ours", "load_cold_dcp", "seconds"
    )
    verdicts.at_most(0.05, "extra memory of a save over the state it saves", "save_extra_mib", "state_mib", "seconds")
    verdicts.at_least_over_all(
        0.7, "bytes per second of an export over raw write and fsync", "raw_write", "export", "seconds"
    )
    verdicts.at_most(
        2.0, "extra memory of an export over its largest tensor", "export_extra_mib", "largest_tensor_mib", "seconds"
    )
    sys.exit(verdicts.missed)


if __name__ == "__main__":
    main()
