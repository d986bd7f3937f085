"""Record the runs that tests/metrics/test_recorded_runs.py reads: `python -m tests.metrics.record_runs`.

Each is an example with a smaller model and fewer steps, in this process, on one rank of the CPU. Of its metrics stay
the numbers that alarms read, rounded to six digits. `recorded/index.json` has the commit and each command.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast import api
from holdfast.config.verbs.roots import load_run
from holdfast.metrics.sink import read_metrics

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "recorded"
KEPT = (
    "step", "loss", "nll", "mean_token_accuracy", "grad_norm", "learning_rate", "optim/no_gradient", "epoch",
    "optim/skipped_steps", "reward", "reward/timeout", "reward/error", "reward/nan", "frac_reward_zero_std",
    "completions/clipped_ratio", "entropy", "entropy_estimate", "kl", "kto/desirable", "rewards/accuracies",
    "rewards/margins", "rollout/completions", "rollout/groups", "rollout/trained_groups", "data/rows",
    "data/truncated", "data/overlong_dropped", "data/untrained",
)  # fmt: skip
SMALL = (
    "launch.ranks=1", "model.config.hidden_size=64", "model.config.intermediate_size=192",
    "model.config.num_hidden_layers=2", "data.batch_size=32", "optim.schedule.warmup_steps=10",
)  # fmt: skip
QUIET = (
    "checkpoint.rehearsal=false", "checkpoint.at_end=false", "checkpoint.every_steps=null",
    "checkpoint.export_at_end=false", "evaluation.sets={}", "evaluation.every_steps=null", "evaluation.at_start=false",
    "evaluation.at_end=false", "evaluation.completions=null", "metrics.progress=off",
)  # fmt: skip
OF_POLICIES = ("launch.ranks=1", "data.batch_size=8", "steps=40")
OF_PAIRS = ("launch.ranks=1", "data.batch_size=16", "steps=50")
SFT, REVERSE, MIXTRAL = (f"sft examples/{name}.yaml" for name in ("sft_sort", "sft_reverse_noisy", "sft_mixtral"))
DPO, REWARD, DISTILL = (
    "dpo examples/dpo_sort.yaml",
    "reward examples/reward_sort.yaml",
    "distill examples/distill_sort.yaml",
)
GRPO, PPO = (f"grpo examples/{name}.yaml" for name in ("grpo_sort", "ppo_sort"))
STARTS = {
    "start_noisy": (SFT, *SMALL, "steps=600", "data.synthetic.noise=0.4", "run.name=sft_sort_noisy"),
    "start_right": (SFT, *SMALL, "steps=400", "run.name=sft_sort"),
}
"""What others begin with; their exports are kept while this runs."""
SOUND = {
    "sft_seed_1": (SFT, *SMALL, "steps=60", "seed=1"),
    "sft_seed_2": (SFT, *SMALL, "steps=60", "seed=2", "data.batch_size=16"),
    "sft_noise": (SFT, *SMALL, "steps=60", "seed=3", "data.synthetic.noise=0.7"),
    "sft_constant": (SFT, *SMALL, "steps=60", "seed=4", "optim.schedule=constant", "optim.lr=1e-3"),
    "sft_low_rate": (SFT, *SMALL, "steps=60", "seed=5", "optim.lr=1e-4"),
    "sft_long_warmup": (SFT, *SMALL, "steps=80", "seed=6", "optim.schedule.warmup_steps=60"),
    "sft_dynamic": (SFT, *SMALL, "steps=60", "seed=7", "objective=dft"),
    "sft_smoothed": (SFT, *SMALL, "steps=60", "seed=8", "objective={kind: nll, label_smoothing: 0.1}"),
    "sft_bfloat16": (SFT, *SMALL, "steps=60", "seed=9", "model.dtype=bfloat16", "optim.kind=adamw_bf16"),
    "sft_further": (SFT, "launch.ranks=1", "data.batch_size=32", "steps=60", "seed=10", "model={path: runs/sft_sort/exports/final}", "optim.lr=2e-4"),  # noqa: E501
    "sft_reverse": (REVERSE, *SMALL, "steps=60", "seed=11"),
    "sft_experts": (MIXTRAL, *SMALL, "steps=60", "seed=12"),
    "dpo_seed_1": (DPO, *OF_PAIRS, "seed=1"),
    "dpo_without_sft": (DPO, *OF_PAIRS, "seed=2", "preference={loss: {kind: dpo, beta: 0.1}}"),
    "dpo_ipo": (DPO, *OF_PAIRS, "seed=3", "preference={loss: ipo}"),
    "dpo_kto": (DPO, *OF_PAIRS, "seed=4", "preference={loss: kto}"),
    "dpo_simpo": (DPO, *OF_PAIRS, "seed=5", "preference={loss: simpo}"),
    "dpo_orpo": (DPO, *OF_PAIRS, "seed=6", "preference={loss: orpo}"),
    "reward_seed_1": (REWARD, *SMALL, "steps=60", "seed=1"),
    "reward_seed_2": (REWARD, *SMALL, "steps=60", "seed=2", "optim.lr=5e-4"),
    "grpo_seed_1": (GRPO, *OF_POLICIES, "seed=1"),
    "grpo_seed_2": (GRPO, *OF_POLICIES, "seed=2", "data.batch_size=16"),
    "grpo_kl": (GRPO, *OF_POLICIES, "seed=3", "kl={coefficient: 0.01}"),
    "grpo_entropy": (GRPO, *OF_POLICIES, "seed=4", "metrics.entropy=true"),
    "grpo_low_rate": (GRPO, *OF_POLICIES, "seed=5", "optim.lr=5e-5"),
    "grpo_cooler": (GRPO, *OF_POLICIES, "seed=6", "rollout.temperature=0.8"),
    "ppo_seed_1": (PPO, "launch.ranks=1", "data.batch_size=64", "steps=40", "seed=1"),
    "ppo_seed_2": (PPO, "launch.ranks=1", "data.batch_size=64", "steps=40", "seed=2", "updates={mini_batches: 1}"),
    "distill_forward": (DISTILL, *SMALL, "steps=60", "seed=1", "rollout=null"),
    "distill_reverse": (DISTILL, *SMALL, "steps=60", "seed=2", "distill={loss: reverse_kl}", "rollout=null"),
}  # fmt: skip
SICK = {
    "sick_dead": (SFT, *SMALL, "steps=30", "optim.lr=1000", "optim.schedule=constant"),
    "sick_rate_too_high": (SFT, *SMALL, "steps=40", "optim.lr=0.5", "optim.schedule=constant"),
    "sick_hardly_a_rate": (SFT, *SMALL, "steps=40", "optim.lr=1e-9", "optim.schedule=constant"),
    "sick_forgets": (SFT, "launch.ranks=1", "data.batch_size=32", "steps=40", "model={path: runs/sft_sort/exports/final}", "optim.lr=0.05", "optim.schedule=constant"),  # noqa: E501
    "sick_not_finite": (SFT, *SMALL, "steps=40", "optim.lr=1e20", "optim.schedule=constant", "optim.max_nonfinite_steps=100"),  # noqa: E501
    "sick_reward_never": (GRPO, *OF_POLICIES, "reward={kind: format, regex: 'never'}"),
    "sick_policy_broken": (GRPO, *OF_POLICIES, "optim.lr=0.01", "optim.schedule=constant"),
    "sick_policy_certain": (GRPO, *OF_POLICIES, "model={path: runs/sft_sort/exports/final}", "rollout.temperature=0.2"),
    "sick_pairs": (DPO, *OF_PAIRS, "optim.lr=0.3", "optim.schedule=constant"),
    "sick_scorer": (REWARD, *SMALL, "steps=40", "optim.lr=30", "optim.schedule=constant"),
}  # fmt: skip


def record(name: str, command: Sequence[str], *, keep: bool) -> dict[str, Any]:
    """Make a run and write its numbers; return what the index says of it."""
    verb, _, path = command[0].partition(" ")
    options = [option for option in command[1:] if not keep or not option.startswith("checkpoint")]
    quiet = [option for option in QUIET if not keep or "checkpoint.ex" not in option]
    named = [] if any(option.startswith("run.name") for option in options) or keep else [f"run.name={name}"]
    loaded = load_run(ROOT / path, [*_last_of_each([*quiet, *options, *named])])
    make: Callable[[Any], Any] = getattr(api, verb)
    ending = ""
    try:
        make(loaded.config)
    except Exception as error:  # noqa: BLE001 - a sick run may end by an error, and has its numbers
        ending = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    lines = read_metrics(Path(loaded.config.run.dir) / str(loaded.config.run.name) / "metrics.jsonl")
    if not keep:
        packed = "".join(json.dumps(_kept(line)) + "\n" for line in lines if "loss" in line)
        (FOLDER / f"{name}.jsonl.gz").write_bytes(gzip.compress(packed.encode(), mtime=0))
    about = {"command": f"holdfast {verb} {path} {' '.join(command[1:])}", "vocabulary": 64}
    return about | ({"ended": ending} if ending else {})


def _last_of_each(options: Sequence[str]) -> list[str]:
    """Return the options, of those that set one key the last."""
    return list({option.partition("=")[0]: option for option in options}.values())


def _kept(line: Mapping[str, float]) -> dict[str, float]:
    # What was no finite number stands there as null.
    return {name: math.nan if line[name] is None else float(f"{line[name]:.6g}") for name in KEPT if name in line}


def main() -> None:
    """Record the runs that are named, or all."""
    wanted = set(sys.argv[1:])
    FOLDER.mkdir(exist_ok=True)
    index_path = FOLDER / "index.json"
    index: dict[str, Any] = json.loads(index_path.read_text()) if index_path.exists() else {"runs": {}}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    index |= {"commit": commit.stdout.strip(), "by": "python -m tests.metrics.record_runs"}
    place = os.environ.get("HOLDFAST_RECORDS") or tempfile.mkdtemp(prefix="holdfast-records-")
    os.chdir(place)
    for name, command in {**STARTS, **SOUND, **SICK}.items():
        is_start = name in STARTS
        if is_start and Path("runs", _run_name(command), "exports", "final").exists():
            continue
        if wanted and not is_start and name not in wanted:
            continue
        print(f"--- {name}", flush=True)
        about = record(name, command, keep=is_start)
        if not is_start:
            index["runs"][name] = about
        index_path.write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def _run_name(command: Sequence[str]) -> str:
    named = [option.partition("=")[2] for option in command if option.startswith("run.name=")]
    return named[0] if named else Path(command[0].partition(" ")[2]).stem


if __name__ == "__main__":
    main()
