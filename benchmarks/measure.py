"""Shared by the benchmark scripts: arms as processes that alternate, their cost, and the models that they train.

An arm is this interpreter running a script with `--arm NAME`; it prints one JSON line. Arms take turns for several
rounds, and those that call `take_turn` also within a round, update by update, so that a slow second of the machine hits
all of them; a ratio is formed within a round, and the worst round decides. On the CPU cost is CPU seconds of the
process and resident memory, at one thread: wall time on a shared machine measures its other users. On a GPU it is
synchronised seconds and allocated memory, and arms run `alone`, from start to end, since there is no room for several.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    # Without it glibc keeps freed memory in its heap and a peak cannot be told from what was there before.
    "MALLOC_MMAP_THRESHOLD_": "262144",
}

TURNS = "HOLDFAST_BENCHMARK_TURN"
"""Says to an arm that others wait for it, and to the script that an arm has made an update."""

FAILED = "failed"
"""Key of why an arm that ran alone has no numbers."""

Round = dict[str, dict[str, Any]]
"""What each arm printed in one round."""


def peak_from_here(counters: Any) -> Callable[[], int]:
    """Begin a device's counter of allocated memory anew; return a function that tells the most since then.

    A trainer may begin the counter anew too, as ours does in each phase of a step: what it says before is kept.

    Args:
        counters: The module `torch.cuda`.
    """
    reset = counters.reset_peak_memory_stats
    largest = 0

    def keep_and_reset(*args: Any, **options: Any) -> None:
        nonlocal largest
        largest = max(largest, int(counters.max_memory_allocated()))
        reset(*args, **options)

    reset()
    for names in (counters, getattr(counters, "memory", counters)):  # torch has the function under two names
        names.reset_peak_memory_stats = keep_and_reset
    return lambda: max(largest, int(counters.max_memory_allocated()))


class Meter:
    """Time and peak memory of this process on one kind of device.

    Args:
        device: "cpu" or "cuda".
        wall: Seconds of a CPU are those of the clock: arms have several threads.
    """

    def __init__(self, device: str = "cpu", *, wall: bool = False) -> None:
        self.on_gpu, self._wall = device == "cuda", wall
        self._before = 0.0
        self._peak: Callable[[], int] = lambda: 0

    def seconds(self) -> float:
        """Return CPU seconds of this process, or wall seconds at which the GPU had nothing left to do."""
        if not self.on_gpu:
            return time.perf_counter() if self._wall else time.process_time()
        import torch

        torch.cuda.synchronize()
        return time.perf_counter()

    def begin_peak(self, *, whole: bool = False) -> None:
        """Count memory from here.

        Args:
            whole: What is in use now is part of the peak.
        """
        if self.on_gpu:
            import torch

            self._peak = peak_from_here(torch.cuda)
            self._before = torch.cuda.memory_allocated() / 2**20
        else:
            self._before = resident_mib()
            Path("/proc/self/clear_refs").write_text("5")
        self._before = 0.0 if whole else self._before

    def peak_mib(self) -> float:
        """Return the most memory in use since `begin_peak`; without `whole`, above what was in use then."""
        if self.on_gpu:
            return self._peak() / 2**20 - self._before
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024 - self._before
        return float("nan")


def resident_mib() -> float:
    """Return resident memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def heading(*distributions: str, device: str = "cpu") -> str:
    """Say when, on what and with which versions a script ran."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    where = f"{os.cpu_count()}-core {platform.machine()} CPU, 1 thread, CPU seconds"
    if device == "cuda":
        import torch

        where = f"{torch.cuda.get_device_name()}, synchronised seconds"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *distributions))
    return f"{now}; {where}; {versions}"


def take_turn() -> None:
    """Wait in an arm until the others have made their updates; one that was started by hand goes on."""
    if os.environ.get(TURNS):
        assert sys.__stdout__ is not None
        print(TURNS, file=sys.__stdout__, flush=True)
        sys.stdin.readline()


@dataclass(frozen=True)
class Ranks:
    """The processes of one arm."""

    count: int = 1
    connected: bool = True
    """Whether they are ranks of one world, or know nothing of each other: what neighbours cost by being there."""


class Arm:
    """One arm in a process of its own, or in several that work side by side; they work when they are told to.

    Args:
        script: Its path.
        arm: What it is called with.
        arguments: Further arguments.
        ranks: Its processes.
        alone: It takes no turns: the first `go_on` returns at its end.
    """

    def __init__(self, script: str, arm: str, arguments: Sequence[str], ranks: Ranks, *, alone: bool = False) -> None:
        self._name, self._said, self._ranks = arm, [list[str]() for _ in range(ranks.count)], ranks
        self._command = [sys.executable, script, "--arm", arm, *arguments]
        self._environment = {**os.environ, **ENVIRONMENT, **({} if alone else {TURNS: "1"})}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the arm
        self._processes: list[subprocess.Popen[str]] = []
        self.ended = False

    def _start(self) -> None:
        ranks = self._ranks
        together = _world(ranks.count) if ranks.connected and ranks.count > 1 else [{}] * ranks.count
        self._processes = [
            subprocess.Popen(
                self._command,
                env={**self._environment, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
            for variables in together
        ]

    def go_on(self) -> None:
        """Return when the arm has made an update or has ended; the first call starts it."""
        if not self._processes:
            self._start()
        else:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
        going = [self._heard(number) for number in range(len(self._processes))]
        self.ended = not all(going)

    def _heard(self, number: int) -> bool:
        """Wait for a process; return whether it has more to do."""
        output = self._processes[number].stdout
        assert output is not None
        for line in output:
            if line.strip() == TURNS:
                return True
            self._said[number].append(line)
        return False

    def result(self) -> dict[str, Any]:
        """Return what the arm printed last; of several processes, their mean.

        Raises:
            ArmFailed: It ended with an error.
        """
        found: list[dict[str, Any]] = []
        for process, said in zip(self._processes, self._said, strict=True):
            lines = [line for line in said if line.startswith("{")]
            if process.wait() != 0 or not lines:
                self._errors.seek(0)
                raise ArmFailed(self._name, f"{''.join(said)[-2000:]}\n{self._errors.read()[-4000:]}")
            found.append(json.loads(lines[-1]))
        return found[0] if len(found) == 1 else {key: _mean([one[key] for one in found]) for key in found[0]}


class ArmFailed(Exception):  # noqa: N818 - the name says what happened
    """An arm ended with an error."""

    def __init__(self, arm: str, output: str) -> None:
        super().__init__(f"arm {arm} failed:\n{output}")
        lines = output.strip().splitlines()
        self.reason = lines[-1].strip()[:200] if lines else "without a word"
        """The last line that it printed."""


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of lists of them one by one."""
    if isinstance(values[0], list):
        return [statistics.mean(items) for items in zip(*values, strict=True)]
    return statistics.mean(values)


def _in_turn(
    script: str, names: Sequence[str], arguments: Sequence[str], ranks: Mapping[str, Ranks]
) -> dict[str, dict[str, Any]]:
    """Run arms one update at a time, each when the one before it has made its own."""
    arms = {name: Arm(script, name, arguments, ranks.get(name, Ranks())) for name in names}
    for arm in arms.values():
        arm.go_on()
    backwards = False
    while not all(arm.ended for arm in arms.values()):
        for arm in reversed(arms.values()) if backwards else arms.values():
            if not arm.ended:
                arm.go_on()
        backwards = not backwards
    try:
        return {name: arm.result() for name, arm in arms.items()}
    except ArmFailed as failure:
        sys.exit(str(failure))


def _alone(script: str, names: Sequence[str], arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run arms one after the other, each from its start to its end; one that fails leaves its reason."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        arm = Arm(script, name, arguments, Ranks(), alone=True)
        try:
            arm.go_on()
            found[name] = arm.result()
        except ArmFailed as failure:
            print(failure, flush=True)
            found[name] = {FAILED: failure.reason}
    return found


def alternate(
    script: str,
    arms: Sequence[str],
    rounds: int,
    *arguments: str,
    ranks: Mapping[str, Ranks] | None = None,
    alone: bool = False,
) -> list[Round]:
    """Run all arms in turn, `rounds` times and every other time backwards, and print what each says.

    Args:
        script: Its path; called with `--arm NAME` and the arguments.
        arms, rounds, arguments: What to run.
        ranks: The processes of arms that have more than one.
        alone: One arm is in memory at a time. One that fails does not stop the others.
    """
    found = []
    for number in range(rounds):
        order = list(arms) if number % 2 == 0 else list(reversed(arms))
        turn = _alone(script, order, arguments) if alone else _in_turn(script, order, arguments, ranks or {})
        found.append({arm: turn[arm] for arm in arms})
        show_round(number, found[-1])
    return found


def _world(ranks: int) -> list[dict[str, str]]:
    """Return the variables that make processes of this machine ranks of one world."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    return [address | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def show_round(number: int, turn: Round) -> None:
    """Print what each arm of a round says."""
    for arm, said in turn.items():
        cells = [_cell(*item) for item in said.items() if not isinstance(item[1], list)]
        print(f"round {number + 1}  {arm:30}" + "  ".join(cells), flush=True)


def _cell(name: str, value: Any) -> str:
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def _shape(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, shared: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _shape(256, 32, 64, 2, 2, 1),
    "small": _shape(32_000, 256, 1408, 4, 4, 2),
    "135m": _shape(49_152, 576, 1536, 30, 9, 3),
    "0.5b": _shape(151_936, 896, 4864, 24, 14, 2),
    "1.5b": _shape(151_936, 1536, 8960, 28, 12, 2),
    "7b of six layers": _shape(152_064, 3584, 18_944, 6, 28, 4) | {"tie_word_embeddings": False},
}
"""Shapes of Qwen2. `small` is trained on a CPU; `tiny` only shows that a script runs."""


def settings_of(shape: str) -> dict[str, Any]:
    """Return the configuration of a model, as `model.config` takes it."""
    return {"model_type": "qwen2", "max_position_embeddings": 4096, "tie_word_embeddings": True, **SHAPES[shape]}


def random_model(shape: str, device: str = "cpu") -> Any:
    """Return a model of a shape in float32; its weights are the same in every process on one kind of device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(**settings_of(shape))
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
