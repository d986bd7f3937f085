"""What runs on one GPU do as their users start them: by the command, from random weights.

    python benchmarks/whole_runs.py stall | plan | prove | recipes [--tiny]

`stall`: SFT of a 0.5B shape that saves while it trains, and what a save takes of training's time. `plan`: peaks of
phases as runs measure them over those that `holdfast plan` says. `prove`: `holdfast prove` of SFT and GRPO. `recipes`:
five steps of each file in examples/gpu whose plan fits this device; the models have the shapes that the package knows
of theirs. `--tiny` does all of it with tiny models on the CPU, which says that the script runs and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measure import ENVIRONMENT, SHAPES, heading, settings_of
from verdicts import number, show, skip

RECIPES = sorted((Path(__file__).resolve().parents[1] / "examples" / "gpu").glob("*.yaml"))
WITHIN = 0.05
"""Share by which a measured peak may differ from the planned one."""


@dataclass(frozen=True)
class Machine:
    """Where runs are made, and the folder of all that they write."""

    folder: Path
    tiny: bool

    @cached_property
    def device(self) -> str:
        """The device type of the runs."""
        return "cpu" if self.tiny else "cuda"

    @cached_property
    def name(self) -> str:
        """The device as `holdfast plan` calls it; h100 for one that it does not know."""
        import torch

        from holdfast.features.plan.devices import DEVICES

        said = "" if self.tiny else torch.cuda.get_device_name().lower()
        return "cpu" if self.tiny else next((name for name in DEVICES if name in said), "h100")

    @cached_property
    def memory(self) -> int:
        """Bytes of the device."""
        import torch

        return 2**34 if self.tiny else int(torch.cuda.mem_get_info()[1])

    def texts(self, rows: int, length: int) -> Path:
        """Return a file of rows that are texts of one length, a token per character."""
        file = self.folder / f"rows-{rows}-{length}.jsonl"
        line = ("abcdefghijklmnopqrstuvwxyz0123456789" * (length // 36 + 1))[: length - 1]
        file.write_text("".join(json.dumps({"text": line[n % 36 :] + line[: n % 36]}) + "\n" for n in range(rows)))
        return file

    def sft(self, name: str, shape: str, steps: int, **sections: Any) -> Path:
        """Write the configuration of a run of SFT, 8 rows of 1,024 tokens an update."""
        rows, length = (2, 64) if self.tiny else (8, 1024)
        model = {"config": settings_of("tiny" if self.tiny else shape), "tokenizer": "builtin:characters"}
        data = {"batch_size": rows, "max_length": length, "tokens_per_micro_batch": rows * length}
        return self.run_file(
            name,
            {
                "steps": steps,
                "model": model | sections.pop("model", {}),
                "data": {"path": str(self.texts(rows * steps, length)), **data},
                "optim": {"lr": 1e-5, "schedule": "constant"},
                **sections,
            },
        )

    def run_file(self, name: str, tree: dict[str, Any]) -> Path:
        """Write a configuration."""
        run = {"dir": str(self.folder), "name": name}
        tree = {**tree, "run": run, "launch": {"device": self.device, "ranks": 1}, "metrics": {"progress": "off"}}
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps(tree))  # JSON is YAML
        return file


def holdfast(*arguments: str | Path, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the command; show what it says on standard output, unless it is for a program."""
    # A GPU's host has cores for the random start; one thread is for CPU seconds.
    environment = {**os.environ, **{key: value for key, value in ENVIRONMENT.items() if key != "OMP_NUM_THREADS"}}
    command = [sys.executable, "-W", "ignore", "-m", "holdfast.cli.main", *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if not quiet:
        print(done.stdout, end="", flush=True)
    return done


NO_SAVES = {"rehearsal": False, "at_end": False, "export_at_end": False}


def stall(machine: Machine) -> bool:
    """Save every so many steps, and print what training waits for."""
    every, saves = (4, 2) if machine.tiny else (60, 3)
    checkpoint = {"every_steps": every, "at_end": False, "export_at_end": False, "keep": {"last": 2}}
    file = machine.sft("stall", "0.5b", every * saves + every // 2, checkpoint=checkpoint)
    if holdfast("sft", file).returncode:
        show("checkpoint stall", "the run failed", met=False)
        return True
    lines = [json.loads(line) for line in (machine.folder / "stall" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_time" in line][2:]  # the first ones compile
    waits = [step["timing/save"] + step.get("timing/save_wait", 0.0) for step in steps if "timing/save" in step]
    usual = statistics.median(step["step_time"] for step in steps)
    lost = sum(step["step_time"] for step in steps) - usual * len(steps)
    show("seconds of a step, median", number(usual))
    show(f"seconds that training waits for a save, median of {len(waits)}", number(statistics.median(waits)))
    show("the longest of them", number(max(waits)))
    show("seconds of training that a save costs in all, while it is written included", number(lost / len(waits)))
    return False


def plan(machine: Machine) -> bool:
    """Compare peaks of phases with a plan's."""
    lora: dict[str, Any] = {"model": {"lora": {"rank": 16}, "frozen_dtype": "bfloat16"}}
    runs: dict[str, tuple[str, dict[str, Any]]] = {
        "SFT of 0.5B": ("0.5b", {}),
        "SFT of six layers of 7B": ("7b of six layers", {}),
    }
    if find_spec("peft") is None:
        skip("LoRA on six layers of 7B", "peft is not installed")
    else:
        runs["LoRA on six layers of 7B"] = ("7b of six layers", lora)
    missed = [_plan_of(machine, name, shape, more) for name, (shape, more) in runs.items()]
    return any(missed)


def _plan_of(machine: Machine, name: str, shape: str, more: dict[str, Any]) -> bool:
    from holdfast.features.plan.checks.measured import measured_peaks

    file = machine.sft(name.replace(" ", "_"), shape, 4, checkpoint=NO_SAVES, **more)
    planned = planned_of(file, machine)
    if not planned["executed"]:
        skip(f"plan of {name}", "; ".join(planned["notes"]) or "nothing could be executed here")
        return False
    if holdfast("sft", file).returncode:
        show(f"plan of {name}", "the run failed", met=False)
        return True
    _, measured = measured_peaks(machine.folder / file.stem)
    missed = False
    for phase, bytes_ in planned["clock_phases"].items():
        title = f"{name}, {phase}: measured peak over planned"
        if machine.tiny:
            skip(title, "a CPU tells the peak of the process, not of its tensors")
        elif bytes_ and phase in measured:
            ratio = measured[phase] / bytes_
            met = abs(ratio - 1) <= WITHIN
            missed = missed or not met
            show(title, f"{ratio:.3f} of {bytes_ / 2**30:.2f} GiB", f"{1 - WITHIN} to {1 + WITHIN}", met=met)
    return missed


def planned_of(file: Path, machine: Machine, *overrides: str) -> dict[str, Any]:
    """Return what `holdfast plan` says of a run on this device.

    Raises:
        RuntimeError: It says nothing.
    """
    options = ["--ranks", "1", "--device", machine.name, "--memory", f"{machine.memory}B", "--json"]
    done = holdfast("plan", file, *overrides, *options, quiet=True)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"holdfast plan {file.name} ended with exit code {done.returncode} and no plan")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def prove(machine: Machine) -> bool:
    """Kill and resume a run of each kind, and compare it bit for bit."""
    smaller = {"num_hidden_layers": 4, "vocab_size": 32_000}  # checkpoints are written after every step
    config = settings_of("tiny") if machine.tiny else settings_of("0.5b") | smaller
    model = {"config": config, "tokenizer": "builtin:characters"}
    data = {"synthetic": {"task": "sort", "rows": 512}, "batch_size": 8, "max_length": 64}
    optim = {"lr": 1e-4, "schedule": "constant"}
    # Without `determinism`, torch's backward pass of attention adds in any order on a GPU.
    tree = {"steps": 6, "model": model, "data": data, "optim": optim, "determinism": True}
    rollout = {"rollout": {"group_size": 4, "max_new_tokens": 16, "show": 0}, "reward": "exact"}
    failed = False
    for verb, more in (("sft", {}), ("grpo", rollout)):
        file = machine.run_file(f"prove_{verb}", tree | more)
        code = holdfast("prove", file, "--steps", "6", "--kill-at", "4").returncode
        show(f"holdfast prove of {verb}", "identical" if code == 0 else f"exit code {code}", "identical", met=code == 0)
        failed = failed or code != 0
    return failed


def recipes(machine: Machine) -> bool:
    """Run five steps of each recipe that fits."""
    failed = [_recipe(file, machine) for file in RECIPES]
    return any(failed)


def _recipe(file: Path, machine: Machine) -> bool:
    """Run a recipe, or say why not; return whether it failed."""
    from holdfast.config.verbs.roots import load_run

    overrides = [*random_weights(file, machine), "steps=5"]
    config = load_run(file, overrides).config
    engine = getattr(getattr(config, "rollout", None), "engine", None)
    lora = config.model.lora
    if getattr(engine, "kind", "auto") == "vllm":
        skip(file.stem, "it samples from servers of vLLM on other cards")
    elif config.parallel.context > 1:
        skip(file.stem, "its rows are shared by several ranks")
    elif lora is not None and find_spec("peft") is None:
        skip(file.stem, "peft is not installed")
    elif lora is not None and lora.quantize and find_spec("bitsandbytes") is None:
        skip(file.stem, "bitsandbytes is not installed")
    elif not (planned := planned_of(file, machine, *overrides))["fits"]:
        needed, there = (planned["peak_bytes"] + planned["allowance_bytes"]) / 2**30, machine.memory / 2**30
        skip(file.stem, f"its plan takes {needed:.0f} GiB on one rank, and {there:.0f} are here")
    else:
        code = holdfast(config.verb, file, *overrides).returncode
        show(f"{file.stem}, five steps from random weights", f"exit code {code}", "0", met=code == 0)
        return code != 0
    return False


def random_weights(file: Path, machine: Machine) -> list[str]:
    """Return the overrides by which a recipe runs without its model's files, its rows and its reward."""
    from holdfast.config.yaml12 import parse_file
    from holdfast.features.plan.execution.origin import SHAPE_FOLDER

    values: dict[str, Any] = parse_file(file).values
    shape = json.loads((SHAPE_FOLDER / f"{values['model']['path'].replace('/', '--')}.json").read_text())
    shape = {key: value for key, value in shape.items() if not key.endswith("_token_id")}
    samples = "rollout" in values
    changed: dict[str, Any] = {
        "model.path": None,
        "model.config": shape | (SHAPES["tiny"] if machine.tiny else {}),
        "model.tokenizer": "builtin:characters",
        "run.dir": str(machine.folder),
        "launch.device": machine.device,
        "launch.ranks": 1,
        "metrics.progress": "off",
        **{f"checkpoint.{key}": value for key, value in NO_SAVES.items()},
    }
    batch, length = values["data"]["batch_size"], values["data"]["max_length"]
    if machine.tiny:
        batch, length = 4, 64
        changed |= {"data.batch_size": batch, "data.max_length": length, "data.tokens_per_micro_batch": 4 * length}
        changed |= {"rollout.max_new_tokens": 8, "rollout.group_size": 2} if samples else {}
        changed |= {"data.max_prompt_length": None} if "max_prompt_length" in values["data"] else {}
    if samples:
        changed |= {"data.path": None, "data.synthetic": {"task": "sort", "rows": 5 * batch}, "reward": "exact"}
    else:
        changed |= {"data.path": str(machine.texts(5 * batch, length))}
    return [f"{key}={json.dumps(value)}" for key, value in changed.items()]


PARTS = {"stall": stall, "plan": plan, "prove": prove, "recipes": recipes}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    print(heading("transformers", device="cpu" if options.tiny else "cuda"))
    with tempfile.TemporaryDirectory(prefix="holdfast-benchmark-") as folder:
        sys.exit(PARTS[options.part](Machine(Path(folder), options.tiny)))


if __name__ == "__main__":
    main()
