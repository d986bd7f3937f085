"""`holdfast prove`: a run that was killed and continued is, bit for bit, the run that was not.

Two runs from one file: one straight, one in which a rank kills itself with SIGKILL and the same command goes on. Then
every step's loss, gradient norm and sequences, and every tensor, cursor and random state of the last checkpoint are
compared. `holdfast replay` makes one recorded step again, in this process.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.config.load import load_config
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import engine_of, load_run, verb_of
from holdfast.config.verbs.training import TrainingConfig
from holdfast.config.yaml12 import parse_file
from holdfast.environments.pool import EnvironmentPool
from holdfast.errors import ConfigError, HoldfastError
from holdfast.features.forensics.record_files import check_recorded, is_kept
from holdfast.files import python_module
from holdfast.launch.environment import inherited, resolve_ranks
from holdfast.training.directory import CHECKPOINTS, events

if TYPE_CHECKING:
    from holdfast.checkpoint.place.storage import Storage

PROOF_PHASES = {
    "sft": ("data", "forward_backward", "optimizer"),
    "reward": ("data", "forward_backward", "optimizer"),
    "dpo": ("data", "forward_backward", "optimizer"),
    "distill": ("data", "forward_backward", "optimizer"),
    "grpo": ("data", "rollout", "reward", "forward_backward", "optimizer"),
}
"""What a step passes through, by verb."""
_KILL_VARIABLE, _BREAK_VARIABLE = "HOLDFAST_PROVE_KILL", "HOLDFAST_PROVE_BREAK"
_FORMS_VARIABLE = "HOLDFAST_PROVE_FORMS"
"""As `parallel.mesh` has them; repeated here because that imports torch."""
PROVED_METRICS = ("loss", "reward", "grad_norm", "data/order_hash", "learning_rate")
_STRAIGHT, _KILLED = "straight", "killed"
_OUTSIDE = (
    "sampling is outside of this proof: what {} depends on the clock. The straight run samples and records; the killed "
    "one trains on what was recorded"
)
_SERVERS = "a server computes together"
_EPISODES = "is decoded together while environments are at work"


class ProofFailed(HoldfastError):  # noqa: N818 - the name says what happened
    """One of the runs did not do what the proof needs."""


@dataclass(frozen=True)
class ProofPlan:
    """What is run."""

    verb: str
    file: Path
    overrides: tuple[str, ...]
    steps: int
    kill_at: int
    rank: int
    phase: str
    every: int
    """Steps between checkpoints."""
    outside: str = ""
    """What depends on the clock in sampling, which is outside of the proof then; "" where nothing does."""


def prove(
    path: Path, overrides: Sequence[str], *, steps: int, kill_at: int, seed: int = 0, break_: str | None = None
) -> int:
    """Run the proof, print what was compared, and return 0 if all of it is identical, else 1.

    Raises:
        ConfigError: The kill lies outside the run, or leaves nothing to recompute.
        ProofFailed: A run ended otherwise than it should.
    """
    if not 2 <= kill_at <= steps:
        raise ConfigError(f"--kill-at {kill_at} must lie between 2 and --steps {steps}.")
    loaded = load_run(path, [*overrides, f"steps={steps}"])
    outside = _outside(loaded.config, loaded.base)
    _refuse_unrecorded(loaded.config, outside)
    ranks = resolve_ranks(loaded.config.launch)
    generator = random.Random(seed)
    every = max(1, (kill_at - 1) // 2)
    plan = ProofPlan(
        loaded.config.verb,
        path,
        tuple(overrides),
        steps,
        kill_at,
        generator.randrange(ranks),
        generator.choice(PROOF_PHASES[loaded.config.verb]),
        every,
        outside,
    )
    folder = Path(loaded.config.run.dir) / f".{loaded.config.run.name}.prove"
    shutil.rmtree(folder, ignore_errors=True)  # an earlier proof's: no run can have such a name
    straight, broken = folder / _STRAIGHT, folder / _KILLED
    print(f"straight: {steps} steps on {ranks} rank(s), a checkpoint every {every}", flush=True)
    if plan.outside:
        print(_OUTSIDE.format(plan.outside), flush=True)
    _run(plan, straight, {}, expected=0)
    print(f"killed: SIGKILL to rank {plan.rank} in phase {plan.phase} of step {kill_at}", flush=True)
    alike = {_FORMS_VARIABLE: json.dumps(_forms_of(straight))}
    first = _run(plan, broken, alike | {_KILL_VARIABLE: f"{plan.rank}:{kill_at}:{plan.phase}"}, expected=3)
    began = len(_lines(broken))
    second = _run(plan, broken, alike | ({_BREAK_VARIABLE: break_} if break_ else {}), expected=0)
    _print_resume(plan, broken, began, first, second)
    return _compare(straight, broken, same_sampling=not plan.outside)


def _forms_of(directory: Path) -> dict[str, int]:
    """Return the optional forms that a run has chosen, by its events; see `training.forms`."""
    chosen = (event for event in events(directory, "form") if "rank" not in event and "model" not in event)
    return {event["form"]: event["value"] for event in chosen}


def _outside(config: TrainingConfig, base: Path) -> str:
    """Return what a run decodes together by the clock; "" where that follows from tokens alone.

    Raises:
        ConfigError: Its environment cannot work.
    """
    if engine_of(config) is not None:
        return _SERVERS
    if not isinstance(config, GRPOConfig) or config.environment is None:
        return ""
    with tempfile.TemporaryDirectory(prefix="holdfast-prove-") as folder:
        pool = EnvironmentPool(config.environment, base, Path(folder))
        try:
            pool.start()
            return "" if pool.replayable else _EPISODES
        finally:
            pool.close()


def _refuse_unrecorded(config: TrainingConfig, outside: str) -> None:
    """Refuse a run whose sampling is outside of the proof, and whose updates follow from more than is recorded.

    Raises:
        ConfigError: Its advantage asks for greedy completions, or its verb records none.
    """
    if not outside:
        return
    if not isinstance(config, GRPOConfig):
        why = f"a run of `holdfast {config.verb}` records none"
    elif config.advantage.needs_greedy:
        why = f"advantage: {config.advantage.kind} compares with greedy completions, which are not among them"
    else:
        return
    if outside == _SERVERS:
        raise ConfigError(
            f"A proof of a run that samples from servers (rollout.engine) trains on recorded completions, and {why}. "
            "Prove the run with rollout.engine=auto."
        )
    raise ConfigError(
        f"A proof of a run whose environment is not replayable trains on recorded episodes, and {why}. Give the "
        "environment `replayable = True` if equal rows, seeds and turns give equal observations, or prove the run with "
        "another advantage."
    )


def _run(plan: ProofPlan, directory: Path, variables: Mapping[str, str], *, expected: int) -> int:
    """Run the command and return its process id."""
    command = [
        *python_module("holdfast.cli.main"), plan.verb, str(plan.file), *plan.overrides, f"steps={plan.steps}",
        f"run.name={directory.name}", f"run.dir={directory.parent}", f"checkpoint.every_steps={plan.every}",
        "checkpoint.at_end=true", "checkpoint.export_at_end=false", "metrics.log_every=1", "launch.max_restarts=0",
        "launch.min_ranks=null",
        "checkpoint.storage=null",  # the two runs, and the user's own, would find each other's checkpoints there
    ]  # fmt: skip
    if plan.outside:
        command += ["rollout.record=true", "evaluation.at_start=false", "evaluation.at_end=false"]
        command += ["evaluation.every_steps=null"]
        if directory.name == _KILLED:
            command += [
                f"rollout.engine={{kind: recorded, path: {json.dumps(str((directory.parent / _STRAIGHT).resolve()))}}}"
            ]
    process = subprocess.Popen(
        command, env=inherited(variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output, _ = process.communicate()
    if process.returncode != expected:
        tail = "\n".join(output.splitlines()[-12:])
        raise ProofFailed(
            f"The run in {directory} ended with exit code {process.returncode}, not {expected}. It said:\n{tail}"
        )
    return process.pid


def _lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _print_resume(plan: ProofPlan, directory: Path, began: int, first: int, second: int) -> None:
    rewinds = [line["to"] for line in _lines(directory)[began:] if line.get("event") == "rewind"]
    if not rewinds:
        raise ProofFailed(f"The run in {directory} started from the beginning instead of resuming.")
    again = plan.kill_at - rewinds[0]
    if again < 1 or first == second:
        raise ProofFailed(f"The run in {directory} was not killed in step {plan.kill_at}.")
    steps = "1 step" if again == 1 else f"{again} steps"
    print(f"resumed: process {second} after {first}, from step {rewinds[0]}; {steps} computed again", flush=True)


def _compare(straight: Path, broken: Path, *, same_sampling: bool) -> int:
    from holdfast.metrics.sink import METRICS, read_metrics

    straight_lines, broken_lines = (
        [line for line in read_metrics(run / METRICS) if "loss" in line] for run in (straight, broken)
    )
    divergence = _first_difference_of_steps(straight_lines, broken_lines) or _first_difference_of_states(
        straight, broken, same_sampling=same_sampling
    )
    if divergence is not None:
        print(f"first divergence: {divergence}")
        print(f"both runs are in {straight.parent}")
        return 1
    shutil.rmtree(straight.parent)
    print("identical")
    return 0


def _first_difference_of_steps(straight: list[dict[str, Any]], broken: list[dict[str, Any]]) -> str | None:
    for line, resumed in zip(straight, broken, strict=False):
        for name in (name for name in PROVED_METRICS if name in line):
            if line[name] != resumed[name] or line["step"] != resumed["step"]:
                return f"step {line['step']}: {name} is {line[name]!r} straight and {resumed[name]!r} after the resume"
    if len(straight) != len(broken):
        return f"{len(straight)} steps straight, {len(broken)} with the resume"
    print(f"steps 1 to {len(straight)}: loss, gradient norm, learning rate and sequences are identical")
    return None


def _first_difference_of_states(straight: Path, broken: Path, *, same_sampling: bool) -> str | None:
    from holdfast.checkpoint.inspect.compare import first_different_value, state_hash
    from holdfast.checkpoint.keep import find

    first, second = find.one(str(straight)), find.one(str(broken))
    different = first_different_value(first, second, same_sampling=same_sampling)
    if different is None:
        count = len(first.manifest.tensors)
        print(f"state of step {first.manifest.step}: {count} tensors, cursor and random state are identical")
        print(f"state hash {state_hash(first)}")
    return different


def replay(directory: Path, step: int) -> int:
    """Print what was compared; return 0 if the step is reproduced, else 1.

    Raises:
        ConfigError: The directory holds no policy's run, or not what a replay needs.
    """
    config, storage = _recorded_run(directory, step)
    from holdfast.features.forensics.recorder import read_record
    from holdfast.features.forensics.replay import replay_step
    from holdfast.parallel.mesh import joined_world

    with joined_world(config.launch) as world:
        lines, same = replay_step(config, storage, read_record(directory, step), world)
    for line in lines:
        print(line)
    print(f"step {step} is reproduced" if same else f"step {step} cannot be reproduced")
    return 0 if same else 1


def explain(directory: Path, step: int) -> int:
    """Print why engine and trainer differ on a recorded step; return 0 if they do not.

    Raises:
        ConfigError: As `replay`; or the step has no log-probability of an engine.
    """
    config, storage = _recorded_run(directory, step)
    from holdfast.features.forensics.recorder import read_record
    from holdfast.features.forensics.replay import explain_mismatch
    from holdfast.parallel.mesh import joined_world

    with joined_world(config.launch) as world:
        explanation = explain_mismatch(config, storage, read_record(directory, step), world)
    print(f"{'mean':>9} {'largest':>9}  what is assumed of the engine")
    for fit in explanation.fits:
        print(f"{fit.mean:9.2g} {fit.largest:9.2g}  {fit.cause}")
    for cause, why in explanation.not_tried.items():
        print(f"{'-':>9} {'-':>9}  {cause}: not tried, {why}")
    print(explanation.sentence)
    return 0 if explanation.sentence.startswith("nothing") else 1


def _recorded_run(directory: Path, step: int) -> tuple[GRPOConfig, Storage]:
    """Return a recorded run's configuration, for one process, and its checkpoints; imports nothing that builds models.

    Raises:
        ConfigError: The directory holds no policy's run, the step was not kept, or there is no checkpoint before it.
    """
    from holdfast.checkpoint.place.storage import open_storage

    file = directory / "config.resolved.yaml"
    if not file.exists():
        raise ConfigError(f"{directory} is no run: it has no {file.name}.")
    values = parse_file(file).values
    verb = verb_of(values)
    if verb != GRPOConfig.verb:
        raise ConfigError(
            f"{directory} is a run of `holdfast {verb}`, and only `holdfast grpo` records its steps, with "
            f"rollout.record: true. `holdfast report {directory}` shows this run."
        )
    alone = ["launch.ranks=1", "launch.device=cpu", "parallel.replicate=1", "parallel.shard=auto", "rollout.show=0"]
    context = values.get("parallel", {}).get("context", 1)
    if context > 1:  # one process has the whole of the rows that the run's ranks shared
        tokens = context * values["data"]["tokens_per_micro_batch"]
        alone += ["parallel.context=1", f"data.tokens_per_micro_batch={tokens}"]
    config = load_config(file, [*alone, "rollout.record=false"], GRPOConfig).config
    check_recorded(directory, step)
    storage = open_storage(config.checkpoint.storage or directory / CHECKPOINTS)
    if not is_kept(storage, step - 1):
        raise ConfigError(
            f"Step {step} is made again from the checkpoint of step {step - 1}, and {storage.root} has none. "
            "Keep checkpoints of the steps you want to replay: checkpoint.every_steps, checkpoint.keep.every."
        )
    return config, storage
