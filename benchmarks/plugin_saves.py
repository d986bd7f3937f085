"""Saves inside other trainers: what the plug-ins take, verified, beside what the trainer itself takes, unverified.

    python benchmarks/plugin_saves.py [--rounds 3] [--hosts trainer lightning-mp lightning-fsdp] [--width 2048]

transformers' Trainer under FSDP2, and Lightning's ModelParallelStrategy and FSDPStrategy, each with their sharded save,
on 2 gloo ranks and on a disk. In one process both ways save the same state in turn, ten times a round, under new names;
what was saved is deleted untimed. On a disk wall seconds count, and the median of all pairs: target <= 1.25. A host
that is not installed is said to be missing; tools/test_rescue.sh makes an environment that has Lightning.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

from measure import Round, heading, run_ranks, show_round
from verdicts import Verdicts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the trainers are the tests'

HOSTS = ("trainer", "lightning-mp", "lightning-fsdp")
PAIRS = 10


def timed_pairs(arms: dict[str, Callable[[Path], object]], folder: Path) -> None:
    """Save in turn, and print the seconds of the slower rank for each; all ranks call this."""
    import torch
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for pair in range(-1, PAIRS):  # the first pays for imports and plans
        for name in arms if pair % 2 else reversed(arms):
            place = folder / f"{name}-{pair}"
            gc.collect()
            dist.barrier()
            began = time.perf_counter()
            arms[name](place)
            spent = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if pair >= 0:
                seconds[name].append(float(spent))
            if dist.get_rank() == 0:
                shutil.rmtree(place, ignore_errors=True)
                os.sync()
            dist.barrier()
    if dist.get_rank() == 0:
        for name, values in seconds.items():
            print(json.dumps({"arm": name, "wall": values}), flush=True)
    dist.barrier()
    os._exit(0)


def trainer(folder: Path, width: int) -> None:
    """Save in a transformers Trainer after its first step."""
    from tests.features.trainers.trainer_script import trainer_of
    from transformers import TrainerCallback

    from holdfast.features.trainers.trl import protect

    class Saves(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            def save(way: Any, place: Path) -> None:
                live._save_optimizer_and_scheduler = way  # noqa: SLF001 - the method that a plug-in replaces
                live.args.output_dir = str(place)
                live._save_checkpoint(live.model, None)  # noqa: SLF001 - a save, and nothing else

            timed_pairs({"own": lambda place: save(own, place), "ours": lambda place: save(ours, place)}, folder)

    live: Any = trainer_of(folder, set(), width, Saves())
    own = live._save_optimizer_and_scheduler  # noqa: SLF001 - as above
    ours = protect(live, rehearse=False)._save_optimizer_and_scheduler  # noqa: SLF001 - as above
    live.train()


def lightning(folder: Path, width: int, kind: str) -> None:
    """Save in Lightning's Trainer after its first step."""
    import lightning.pytorch as pl
    from tests.features.trainers.lightning_script import Module, rows, strategy

    class Saves(pl.Callback):
        def on_train_batch_end(self, live: Any, *_: Any) -> None:
            ours = type(live.strategy)
            own = next(each for each in ours.__mro__ if each.__module__.startswith("lightning."))

            def save(way: type, place: Path) -> None:
                for name in ("lightning_module_state_dict", "optimizer_state", "save_checkpoint"):
                    setattr(live.strategy, name, MethodType(getattr(way, name), live.strategy))
                live.save_checkpoint(place, weights_only=False)

            timed_pairs({"own": lambda place: save(own, place), "ours": lambda place: save(ours, place)}, folder)

    chosen = strategy(kind, int(os.environ["WORLD_SIZE"]))
    pl.Trainer(
        accelerator="cpu", devices=2, strategy=chosen, max_epochs=1, callbacks=[Saves()], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    ).fit(Module(kind, width), rows())  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", nargs="*", default=HOSTS)
    parser.add_argument("--width", type=int, default=2048, help="of a model of two layers")
    parser.add_argument("--arm", nargs=2, help="a host and a folder: be a rank")
    arguments = parser.parse_args()
    if arguments.arm is not None:
        host, folder = arguments.arm[0], Path(arguments.arm[1])
        if host == "trainer":
            trainer(folder, arguments.width)
        lightning(folder, arguments.width, host.removeprefix("lightning-"))
    print(heading("transformers", "accelerate"), flush=True)
    missed = False
    for host in arguments.hosts:
        if host.startswith("lightning") and importlib.util.find_spec("lightning") is None:
            print(f"{host}: not installed here", flush=True)
            continue
        rounds: list[Round] = []
        for number in range(arguments.rounds):
            with tempfile.TemporaryDirectory(prefix="saves-", dir=".") as place:
                words = ["--arm", host, place, "--width", str(arguments.width)]
                rounds.append(run_ranks(__file__, 2, *words))
            middle = {arm: {"wall": sorted(said["wall"])[PAIRS // 2]} for arm, said in rounds[-1].items()}
            show_round(number, middle)
        verdicts = Verdicts(rounds)
        verdicts.at_most_over_all(1.25, f"{host}: the plug-in's saves over its own, wall", "ours", "own", "wall")
        missed = missed or verdicts.missed
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
