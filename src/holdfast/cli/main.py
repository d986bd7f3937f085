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
from holdfast.cli.groups import CommandEntry, command_line

_CORE, _FEATURES = "holdfast.cli.commands", "holdfast.features"

COMMANDS = {
    "init": CommandEntry(
        f"{_CORE}.init:init_run", "Write a first configuration from what a model and the first rows show."
    ),
    "sft": CommandEntry(f"{_CORE}.train:sft", "Supervised fine-tuning."),
    "dpo": CommandEntry(f"{_CORE}.train:dpo", "Training on preferences between answers: DPO and its kin."),
    "reward": CommandEntry(f"{_CORE}.train:reward", "Training of a reward model on preferences between answers."),
    "grpo": CommandEntry(f"{_CORE}.train:grpo", "Reinforcement learning from rewards of sampled completions."),
    "distill": CommandEntry(f"{_CORE}.train:distill", "Distillation of a teacher into a student."),
    "eval": CommandEntry(f"{_CORE}.eval:evaluate", "Evaluate a model on the run's evaluation sets or on rows."),
    "generate": CommandEntry(f"{_CORE}.generate:generate", "Complete prompts with models, by plain transformers."),
    "demo": CommandEntry(
        f"{_CORE}.demo:run_demo", "Show the main job on two ranks, one of which is killed on the way."
    ),
    "examples": CommandEntry(f"{_CORE}.examples:lay_down", "Copy the examples here, or one with what it needs."),
    "doctor": CommandEntry(f"{_FEATURES}.plan.commands:doctor", "Look at what a run needs before it starts."),
    "plan": CommandEntry(f"{_FEATURES}.plan.commands:plan", "Say what a run takes on devices, and what to turn."),
    "env": CommandEntry(f"{_FEATURES}.plan.commands:env", "Print what a bug report needs; no secrets."),
    "prove": CommandEntry(
        f"{_FEATURES}.forensics.commands:prove", "Kill a run, resume it, and compare it bit for bit."
    ),
    "replay": CommandEntry(f"{_FEATURES}.forensics.commands:replay", "Make one recorded step again."),
    "explain-mismatch": CommandEntry(
        f"{_FEATURES}.forensics.commands:explain_mismatch", "Say why sampler and trainer differ in log-probabilities."
    ),
    "report": CommandEntry(f"{_FEATURES}.report.commands:report", "Write one page about a run, or about several."),
    "watch": CommandEntry(f"{_FEATURES}.report.commands:watch", "Show a run in the terminal while it goes on."),
    "serve": CommandEntry(f"{_FEATURES}.vllm.commands:serve", "Start the servers of vLLM that a run samples from."),
    "push": CommandEntry(f"{_CORE}.push:push", "Upload an exported model to the Hugging Face hub, privately."),
    "version": CommandEntry(f"{_CORE}.version:version", "Print the versions that decide a run's numbers."),
    "checkpoint ls": CommandEntry(f"{_CORE}.checkpoint:list_checkpoints", "List a run's checkpoints, oldest first."),
    "checkpoint path": CommandEntry(f"{_CORE}.checkpoint:print_path", "Print the path of one checkpoint, for scripts."),
    "checkpoint show": CommandEntry(f"{_CORE}.checkpoint:show", "Print what a checkpoint says of itself."),
    "checkpoint verify": CommandEntry(f"{_CORE}.checkpoint:verify", "Compare checkpoints with their manifests."),
    "checkpoint diff": CommandEntry(f"{_CORE}.checkpoint:diff", "Print where two checkpoints differ first."),
    "checkpoint export": CommandEntry(f"{_CORE}.checkpoint:export", "Write a model directory that transformers loads."),
    "checkpoint check": CommandEntry(f"{_FEATURES}.rescue.commands:check", "Look at a checkpoint of another system."),
    "checkpoint import": CommandEntry(
        f"{_FEATURES}.rescue.commands:import_checkpoint", "Make another system's checkpoint one of ours, or a model."
    ),
    "checkpoint convert": CommandEntry(
        f"{_FEATURES}.rescue.commands:convert", "Rewrite checkpoints of an earlier format."
    ),
    "checkpoint average": CommandEntry(
        f"{_CORE}.checkpoint:average", "Write the mean of several checkpoints' weights."
    ),
    "checkpoint prune": CommandEntry(f"{_CORE}.checkpoint:prune", "Delete older checkpoints."),
    "checkpoint pin": CommandEntry(f"{_CORE}.checkpoint:pin", "Keep a checkpoint whatever retention says."),
    "config show": CommandEntry(f"{_CORE}.config:config_show", "Print the whole tree, defaults included."),
    "config schema": CommandEntry(
        f"{_CORE}.config:config_schema", "Print the tree's JSON schema, for editors and agents."
    ),
    "config diff": CommandEntry(f"{_CORE}.config:config_diff", "Print the keys in which two runs differ."),
    "config import": CommandEntry(f"{_FEATURES}.rescue.commands:config_import", "Write another system's file as ours."),
    "data preview": CommandEntry(f"{_CORE}.data:data_preview", "Print one row as tokens; trained ones are coloured."),
    "data check": CommandEntry(f"{_CORE}.data:data_check", "Read all rows as the run will, before any weight."),
    "launch slurm": CommandEntry(
        f"{_FEATURES}.cluster.commands:run_by_slurm", "Print or submit a batch job for Slurm."
    ),
    "launch ray": CommandEntry(f"{_FEATURES}.cluster.commands:run_by_ray", "Run on a Ray cluster."),
    "model parameters": CommandEntry(
        f"{_CORE}.model:model_parameters", "Print every parameter, and whether it is trained."
    ),
    "model check": CommandEntry(f"{_CORE}.model:model_check", "Look at a model as a run does before step 1."),
    "runs ls": CommandEntry(f"{_CORE}.runs:list_runs", "List runs, the one that was active last first."),
    "runs compare": CommandEntry(f"{_FEATURES}.report.commands:compare_runs", "Compare two runs."),
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


def _print_version(is_requested: bool) -> None:  # noqa: FBT001 - typer's way
    if is_requested:
        from holdfast.config.versions import versions

        typer.echo(f"holdfast {versions().get('holdfast', '(not installed as a package)')}")
        raise typer.Exit


def before_all(
    version: Annotated[  # noqa: ARG001, FBT002 - typer's way
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print Holdfast's own version.")
    ] = False,
) -> None:
    """Post-training of Hugging Face models on FSDP2. A run that starts will save, resume and export."""
    from holdfast.config.quiet import hush  # not at the top: `--help` does without logging

    if left_out := hush():
        typer.echo(f"{left_out} and is left out: Holdfast does without it.", err=True)


app = command_line(COMMANDS, GROUPS, before_all)


def main() -> None:
    """Run the command line; a user's mistake is one paragraph, never a traceback."""
    run(app)


if __name__ == "__main__":
    main()
