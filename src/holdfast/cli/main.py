"""`holdfast`: verbs that train, look and explain.

Exit codes: 0 done; 1 a check says no; 2 usage or configuration; 3 the run stopped and can be started again.
"""

# Files of commands do without `from __future__ import annotations`: typer evaluates each string of it twice at every
# start.
if __name__ == "__main__":  # `python -m`; the program `holdfast` begins in entry.py
    from holdfast import interrupts

    interrupts.end_at_once(3, "Ctrl-C: stopped before anything was started.\n")

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.beforehand import OptionalRunFile, Overrides, RunFile, doctor, env, plan
from holdfast.cli.checkpoint import TrustCode, checkpoint_app
from holdfast.cli.edge import run
from holdfast.cli.hints import HintingGroup
from holdfast.cli.looking import push, report, runs_app, watch

_DASH_H = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    cls=HintingGroup,
    context_settings=_DASH_H,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(cls=HintingGroup, help="Look at a run's configuration.", no_args_is_help=True)
data_app = typer.Typer(cls=HintingGroup, help="Look at a run's data.", no_args_is_help=True)
launch_app = typer.Typer(cls=HintingGroup, help="Run on several machines: by Slurm, or by Ray.", no_args_is_help=True)
model_app = typer.Typer(cls=HintingGroup, help="Look at a run's model.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(launch_app, name="launch")
app.add_typer(model_app, name="model")
app.add_typer(runs_app, name="runs")
for look in (plan, doctor, env, report, watch, push):
    app.command()(look)


class Damage(StrEnum):
    """What `prove --break` damages."""

    rng = "rng"
    cursor = "cursor"
    optimizer = "optimizer"


Model = Annotated[
    str | None, typer.Option("--model", help="With --data, instead of a file: what `holdfast init` would write.")
]
Rows = Annotated[str | None, typer.Option("--data", help="Rows: a file, a directory, or a name on the hub.")]


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer's way
    if asked:
        from importlib.metadata import version

        typer.echo(f"holdfast {version('holdfast')}")
        raise typer.Exit


@app.callback()
def before_all(
    version: Annotated[  # noqa: ARG001, FBT002 - typer's way
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print Holdfast's own version.")
    ] = False,
) -> None:
    """Post-training of Hugging Face models on FSDP2. A run that starts will save, resume and export."""
    from holdfast.text.quiet import hush  # not at the top: `--help` does without logging

    hush()


@app.command("init")
def init_run(
    verb: Annotated[
        str | None, typer.Argument(metavar="[sft|dpo|reward|grpo]", help="Default: what the rows are for.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model's directory, or its name on the hub.")] = None,
    data: Rows = None,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("run.yaml"),
) -> None:
    """Write a first configuration from what a model and the first rows show, with the reasons."""
    from holdfast.cli.run_file.first_file import write_first_file

    write_first_file(verb, model, data, output)


@app.command()
def sft(run: OptionalRunFile = None, overrides: Overrides = None, model: Model = None, data: Rows = None) -> None:
    """Supervised fine-tuning."""
    from holdfast.cli.running.train import train

    raise typer.Exit(train("sft", run, overrides or [], model, data))


@app.command()
def dpo(run: OptionalRunFile = None, overrides: Overrides = None, model: Model = None, data: Rows = None) -> None:
    """Training on preferences between answers: DPO and its kin."""
    from holdfast.cli.running.train import train

    raise typer.Exit(train("dpo", run, overrides or [], model, data))


@app.command()
def reward(run: OptionalRunFile = None, overrides: Overrides = None, model: Model = None, data: Rows = None) -> None:
    """Training of a reward model on preferences between answers."""
    from holdfast.cli.running.train import train

    raise typer.Exit(train("reward", run, overrides or [], model, data))


@app.command()
def grpo(run: OptionalRunFile = None, overrides: Overrides = None, model: Model = None, data: Rows = None) -> None:
    """Reinforcement learning from rewards of sampled completions: GRPO and its kin."""
    from holdfast.cli.running.train import train

    raise typer.Exit(train("grpo", run, overrides or [], model, data))


@app.command()
def distill(run: RunFile, overrides: Overrides = None) -> None:
    """Distillation of a teacher into a student, on rows or on what the student writes."""
    from holdfast.cli.running.train import train

    raise typer.Exit(train("distill", run, overrides or []))


@app.command()
def serve(run: RunFile, overrides: Overrides = None) -> None:
    """Start the servers of vLLM that a run samples from, until Ctrl-C or SIGTERM; weights come from the run."""
    from holdfast.features.vllm.serving import serve as serve_run

    raise typer.Exit(serve_run(run, overrides or []))


@app.command("eval")
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN.yaml|EXPORT", help="A run's file, or an exported model.")],
    overrides: Overrides = None,
) -> None:
    """Evaluate a model on the run's evaluation sets, and write its completions."""
    from holdfast.cli.running.train import train_from

    raise typer.Exit(train_from("eval", target, overrides or []))


@app.command()
def prove(
    run: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Updates of each run.")] = 12,
    kill_at: Annotated[int, typer.Option(min=2, help="The update in which a rank is killed.")] = 7,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the rank and the phase.")] = 0,
    break_: Annotated[
        Damage | None, typer.Option("--break", help="Damage the resumed state: the proof must then fail.")
    ] = None,
) -> None:
    """Kill a run, resume it, and compare it bit for bit with one that was not killed; exit 1 if they differ."""
    from holdfast.features.forensics.proving import prove as prove_run

    raise typer.Exit(
        prove_run(
            run,
            overrides or [],
            steps=steps,
            kill_at=kill_at,
            seed=seed,
            break_=None if break_ is None else break_.value,
        )
    )


@app.command()
def replay(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run with rollout.record: true.")],
    step: Annotated[int, typer.Option(min=1, help="Which step to make again.")],
) -> None:
    """Make one recorded step again, on one CPU process, and compare its loss and gradient; exit 1 if they differ."""
    from holdfast.features.forensics.proving import replay as replay_step

    raise typer.Exit(replay_step(directory, step))


@app.command("explain-mismatch")
def explain_mismatch(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run with rollout.record: true.")],
    step: Annotated[int, typer.Option(min=1, help="Which step to look at.")],
) -> None:
    """Say why the sampler's log-probabilities differ from the trainer's, cause by cause; exit 1 if they do."""
    from holdfast.features.forensics.proving import explain

    raise typer.Exit(explain(directory, step))


@app.command()
def generate(  # noqa: PLR0913, PLR0917 - each is an option of the command
    target: Annotated[str, typer.Argument(metavar="EXPORT|CHECKPOINT|RUN", help="Of a run: its newest checkpoint.")],
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="To complete; may be repeated.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a user in the model's chat template.")] = False,
    rows: Annotated[str | None, typer.Option(metavar="FILE", help="Prompts: JSON lines, JSON or parquet.")] = None,
    column: Annotated[str, typer.Option(help="Of the rows' prompts.")] = "prompt",
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each completion.", show_default="128, or what the model has room for")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most probable token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Draw among the most probable ones.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
    trust_remote_code: TrustCode = False,
) -> None:
    """Complete prompts with a trained model, by plain transformers; without a prompt, a line of standard input."""
    from holdfast.cli.after.generate import generate as complete
    from holdfast.cli.after.plain_generation import CompletionRequest

    decoding = (max_new_tokens, temperature, top_p, seed)
    complete(target, CompletionRequest(prompt or [], rows, column, chat, *decoding, trust_remote_code), as_json=as_json)


@app.command("demo")
def run_demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where everything is written.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of both runs.")] = 0,
) -> None:
    """Show the main job on two ranks: SFT, GRPO, a rank killed on the way, resume, verification, export."""
    from holdfast.cli.running.demo import demo

    raise typer.Exit(demo(directory, seed))


@app.command()
def version() -> None:
    """Print the versions that decide a run's numbers."""
    from holdfast.config.versions import versions

    for name, number in versions().items():
        typer.echo(f"{name} {number}")


@launch_app.command("slurm")
def run_by_slurm(  # noqa: PLR0913, PLR0917 - each is an option of the command
    run: RunFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs and ranks of each.", show_default="launch.ranks, and no GPUs")
    ] = None,
    time: Annotated[str | None, typer.Option(help="Limit, such as 12:00:00.", show_default="the partition's")] = None,
    interface: Annotated[str | None, typer.Option(help="Network interface over which the machines talk.")] = None,
    to_submit: Annotated[bool, typer.Option("--submit", help="Hand it to sbatch instead of printing it.")] = False,
) -> None:
    """Print a batch job for Slurm that requeues itself until the run is done, or submit it."""
    from holdfast.features.cluster.submission import Ask, launch_slurm

    launch_slurm(run, overrides or [], Ask(nodes, gpus_per_node, time, interface), to_submit=to_submit)


@launch_app.command("ray")
def run_by_ray(  # noqa: PLR0913, PLR0917 - each is an option of the command
    run: RunFile,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, on all machines together.")] = 1,
    gpus_per_rank: Annotated[int, typer.Option(min=0, help="0: ranks compute on CPUs.")] = 0,
    address: Annotated[
        str | None, typer.Option(help="Of a cluster; auto: the one that runs here.", show_default="Ray decides")
    ] = None,
) -> None:
    """Run on a Ray cluster, an actor a rank, and end with the run's exit code."""
    from holdfast.features.cluster.ray import RayAsk
    from holdfast.features.cluster.submission import launch_on_ray

    raise typer.Exit(launch_on_ray(run, overrides or [], RayAsk(ranks, gpus_per_rank, address)))


@config_app.command("show")
def config_show(run: RunFile, overrides: Overrides = None) -> None:
    """Print the whole tree, defaults included."""
    from holdfast.cli.run_file.inspect import show_config

    typer.echo(show_config(run, overrides or []), nl=False)


@config_app.command("schema")
def config_schema(verb: Annotated[str, typer.Argument(help="Which verb's tree.")] = "sft") -> None:
    """Print the tree's JSON schema, for editors and agents."""
    from holdfast.cli.run_file.inspect import schema

    typer.echo(schema(verb))


@config_app.command("diff")
def config_diff(
    first: Annotated[Path, typer.Argument(help="A YAML file, or the directory of a run.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Print the keys in which two runs differ; exit 1 if they do."""
    from holdfast.cli.run_file.inspect import diff_configs

    lines = diff_configs(first, second)
    for line in lines:
        typer.echo(line)
    raise typer.Exit(1 if lines else 0)


@config_app.command("import")
def config_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML or JSON that another system reads.")],
    system: Annotated[str, typer.Option("--from", help="trl, easyr1, verl, axolotl or llamafactory.")],
    verb: Annotated[
        str | None, typer.Option("--for", help="The command it is for; default: what the file says.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Of the run, where batches there count rows of one device.")] = 1,
    to: Annotated[Path | None, typer.Option(metavar="RUN.yaml", help="Where to write it; default: print it.")] = None,
) -> None:
    """Write another system's file as ours, key by key with what differs; exit 1 if it needs a hand before it loads."""
    from holdfast.features.rescue.config_import import import_config

    raise typer.Exit(import_config(file, system, verb, ranks, to))


@data_app.command("preview")
def data_preview(
    run: RunFile,
    overrides: Overrides = None,
    row: Annotated[int, typer.Option(min=0, help="Which row of the first source, from 0.")] = 0,
) -> None:
    """Print one row as tokens; trained ones are coloured."""
    from holdfast.cli.run_file.inspect import preview

    preview(run, overrides or [], row)


@data_app.command("check")
def data_check(
    run: RunFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002 - typer's way
) -> None:
    """Read all rows as the run will, before any weight; exit 1 if it would stop at one of them."""
    from holdfast.cli.run_file.data_check import check_data

    raise typer.Exit(check_data(run, overrides or [], as_json=as_json))


@model_app.command("parameters")
def model_parameters(run: RunFile, overrides: Overrides = None) -> None:
    """Print every parameter's name, shape, and whether it is trained."""
    from holdfast.cli.run_file.inspect import parameters

    for line in parameters(run, overrides or []):
        typer.echo(line)


@model_app.command("check")
def model_check(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|RUN.yaml", help="A directory, a config.json, a hub name, or a run's file.")
    ],
    overrides: Overrides = None,
) -> None:
    """Look at a model as a run does before step 1, large ones on a small configuration; exit 1 if it is refused."""
    from holdfast.cli.run_file.inspect import check

    raise typer.Exit(check(target, overrides or []))


def main() -> None:
    """Run the command line; a user's mistake is one paragraph, never a traceback."""
    run(app)


if __name__ == "__main__":
    main()
