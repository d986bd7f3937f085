"""`holdfast`: verbs that train, look and explain.

Exit codes: 0 done; 1 a check says no; 2 usage or configuration; 3 the run stopped and can be started again.
"""

# Files of commands do without `from __future__ import annotations`: typer evaluates each string of it twice at every
# start.
if __name__ == "__main__":  # `python -m`; the program `holdfast` begins in entry.py
    from holdfast import interrupts

    interrupts.end_at_once(3, "Ctrl-C: stopped before anything was started.\n")

from typing import Annotated

import typer

from holdfast.cli.edge import run
from holdfast.cli.groups import Listed, command_line

_CORE, _FEATURES = "holdfast.cli.commands", "holdfast.features"

COMMANDS = {
    "init": Listed(f"{_CORE}.init:init_run", "Write a first configuration from what a model and the first rows show."),
    "sft": Listed(f"{_CORE}.train:sft", "Supervised fine-tuning."),
    "dpo": Listed(f"{_CORE}.train:dpo", "Training on preferences between answers: DPO and its kin."),
    "reward": Listed(f"{_CORE}.train:reward", "Training of a reward model on preferences between answers."),
    "grpo": Listed(f"{_CORE}.train:grpo", "Reinforcement learning from rewards of sampled completions."),
    "distill": Listed(f"{_CORE}.train:distill", "Distillation of a teacher into a student."),
    "eval": Listed(f"{_CORE}.eval:evaluate", "Evaluate a model on the run's evaluation sets or on rows."),
    "generate": Listed(f"{_CORE}.generate:generate", "Complete prompts with models, by plain transformers."),
    "demo": Listed(f"{_CORE}.demo:run_demo", "Show the main job on two ranks, one of which is killed on the way."),
    "doctor": Listed(f"{_FEATURES}.plan.commands:doctor", "Look at what a run needs before it starts."),
    "plan": Listed(f"{_FEATURES}.plan.commands:plan", "Say what a run takes on devices, and what to turn."),
    "env": Listed(f"{_FEATURES}.plan.commands:env", "Print what a bug report needs; no secrets."),
    "prove": Listed(f"{_FEATURES}.forensics.commands:prove", "Kill a run, resume it, and compare it bit for bit."),
    "replay": Listed(f"{_FEATURES}.forensics.commands:replay", "Make one recorded step again."),
    "explain-mismatch": Listed(
        f"{_FEATURES}.forensics.commands:explain_mismatch", "Say why sampler and trainer differ in log-probabilities."
    ),
    "report": Listed(f"{_FEATURES}.report.commands:report", "Write one page about a run, or about several."),
    "watch": Listed(f"{_FEATURES}.report.commands:watch", "Show a run in the terminal while it goes on."),
    "serve": Listed(f"{_FEATURES}.vllm.commands:serve", "Start the servers of vLLM that a run samples from."),
    "push": Listed(f"{_CORE}.push:push", "Upload an exported model to the Hugging Face hub, privately."),
    "version": Listed(f"{_CORE}.version:version", "Print the versions that decide a run's numbers."),
    "checkpoint ls": Listed(f"{_CORE}.checkpoint:list_checkpoints", "List a run's checkpoints, oldest first."),
    "checkpoint path": Listed(f"{_CORE}.checkpoint:print_path", "Print the path of one checkpoint, for scripts."),
    "checkpoint show": Listed(f"{_CORE}.checkpoint:show", "Print what a checkpoint says of itself."),
    "checkpoint verify": Listed(f"{_CORE}.checkpoint:verify", "Compare checkpoints with their manifests."),
    "checkpoint diff": Listed(f"{_CORE}.checkpoint:diff", "Print where two checkpoints differ first."),
    "checkpoint export": Listed(f"{_CORE}.checkpoint:export", "Write a model directory that transformers loads."),
    "checkpoint check": Listed(f"{_FEATURES}.rescue.commands:check", "Look at a checkpoint of another system."),
    "checkpoint import": Listed(
        f"{_FEATURES}.rescue.commands:import_checkpoint", "Make another system's checkpoint one of ours, or a model."
    ),
    "checkpoint average": Listed(f"{_CORE}.checkpoint:average", "Write the mean of several checkpoints' weights."),
    "checkpoint prune": Listed(f"{_CORE}.checkpoint:prune", "Delete older checkpoints."),
    "checkpoint pin": Listed(f"{_CORE}.checkpoint:pin", "Keep a checkpoint whatever retention says."),
    "config show": Listed(f"{_CORE}.config:config_show", "Print the whole tree, defaults included."),
    "config schema": Listed(f"{_CORE}.config:config_schema", "Print the tree's JSON schema, for editors and agents."),
    "config diff": Listed(f"{_CORE}.config:config_diff", "Print the keys in which two runs differ."),
    "config import": Listed(f"{_FEATURES}.rescue.commands:config_import", "Write another system's file as ours."),
    "data preview": Listed(f"{_CORE}.data:data_preview", "Print one row as tokens; trained ones are coloured."),
    "data check": Listed(f"{_CORE}.data:data_check", "Read all rows as the run will, before any weight."),
    "launch slurm": Listed(f"{_FEATURES}.cluster.commands:run_by_slurm", "Print or submit a batch job for Slurm."),
    "launch ray": Listed(f"{_FEATURES}.cluster.commands:run_by_ray", "Run on a Ray cluster."),
    "model parameters": Listed(f"{_CORE}.model:model_parameters", "Print every parameter, and whether it is trained."),
    "model check": Listed(f"{_CORE}.model:model_check", "Look at a model as a run does before step 1."),
    "runs ls": Listed(f"{_CORE}.runs:list_runs", "List runs, the one that was active last first."),
    "runs compare": Listed(f"{_FEATURES}.report.commands:compare_runs", "Compare two runs."),
}
"""Command to the function that is it, whose file is imported when the command is called, and a line of help."""
GROUPS = {
    "checkpoint": "Look at a run's checkpoints, verify, export, keep and delete them.",
    "config": "Look at a run's configuration.",
    "data": "Look at a run's data.",
    "launch": "Run on several machines: by Slurm, or by Ray.",
    "model": "Look at a run's model.",
    "runs": "Look at the runs in a directory.",
}


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer's way
    if asked:
        from holdfast.config.versions import versions

        typer.echo(f"holdfast {versions().get('holdfast', '(not installed as a package)')}")
        raise typer.Exit


def before_all(
    version: Annotated[  # noqa: ARG001, FBT002 - typer's way
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print Holdfast's own version.")
    ] = False,
) -> None:
    """Post-training of Hugging Face models on FSDP2. A run that starts will save, resume and export."""
    from holdfast.text.quiet import hush  # not at the top: `--help` does without logging

    hush()


app = command_line(COMMANDS, GROUPS, before_all)


def main() -> None:
    """Run the command line; a user's mistake is one paragraph, never a traceback."""
    run(app)


if __name__ == "__main__":
    main()
