"""`holdfast checkpoint`: look at checkpoints, prove them whole, make models of them, keep and delete them."""

# As cli/main.py, without `from __future__ import annotations`.
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast import registry
from holdfast.cli.arguments import IS_MODEL, IS_ROWS, Dtype, TrustCode, takes, torch_dtype
from holdfast.config.path_kinds import PathKind
from holdfast.errors import ConfigError

_IS_CHECKPOINT = takes(PathKind.CHECKPOINT, PathKind.RUN, PathKind.CHECKPOINTS)


PathArgument = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A run, a checkpoint, or a URL.", show_default=False, callback=_IS_CHECKPOINT),
]


Base = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The model that a checkpoint without frozen weights was saved beside.",
        show_default="where the run read it",
        callback=IS_MODEL,
    ),
]


Mode = Annotated[
    str | None,
    typer.Option(metavar="max|min", help="Whether more of the metric is better.", show_default="as the run has it"),
]


class InspectionLevel(StrEnum):
    """How closely a checkpoint is looked at."""

    names = "names"
    files = "files"
    tensors = "tensors"


class ExportForm(StrEnum):
    """What an export is."""

    hf = "hf"
    torch = "torch"
    gguf = "gguf"
    compressed_tensors = "compressed-tensors"

    @property
    def is_served(self) -> bool:
        """Return whether it is the format of a program that serves models."""
        return self in {ExportForm.gguf, ExportForm.compressed_tensors}


class TensorType(StrEnum):
    """Type of the weights of an export for a program that serves models."""

    f16 = "f16"
    q8_0 = "q8_0"
    fp8 = "fp8"
    int8 = "int8"


def list_checkpoints(
    run: PathArgument,
    metric: Annotated[list[str] | None, typer.Option(help="Show this metric; may be repeated.")] = None,
) -> None:
    """List a run's checkpoints, oldest first, with the metrics of their steps."""
    from holdfast.cli.commands.checkpoint.views import listing

    for line in listing(run, metric or []):
        typer.echo(line)


def print_path(
    run: PathArgument,
    best: Annotated[str | None, typer.Option(metavar="METRIC", help="The best by a metric of its own step.")] = None,
    mode: Mode = None,
    last: Annotated[bool, typer.Option("--last", help="The newest without NaN or infinity; the default.")] = False,
) -> None:
    """Print the path of one checkpoint, for scripts."""
    from holdfast.checkpoint.keep import find

    if best is not None and last:
        raise ConfigError("--best and --last name two checkpoints; give one of them.")
    if mode not in {None, "max", "min"}:
        raise ConfigError(f"--mode {mode} is neither max nor min.")
    if best is None:
        checkpoint = find.one(run)
        for step in find.newer_not_finite(checkpoint):
            typer.echo(f"step {step} is newer, and a tensor in it holds NaN or infinity; name it to have it", err=True)
        typer.echo(checkpoint.path)
        return
    storage = find.folder_of(run)
    typer.echo(f"{storage.root}/{find.best(storage, best, mode)[0]}")


def show(checkpoint: PathArgument) -> None:
    """Print what a checkpoint says of itself: contents, sizes, mesh, versions, metrics, tensors."""
    from holdfast.cli.commands.checkpoint.views import description

    for line in description(checkpoint):
        typer.echo(line)


def verify(
    path: PathArgument,
    level: Annotated[
        InspectionLevel, typer.Option(help="names and sizes; files' hashes; tensors, read one by one.")
    ] = InspectionLevel.tensors,
) -> None:
    """Compare a checkpoint, or every one of a run, with its manifest; exit 1 and name the tensor if it is damaged."""
    from holdfast.cli.commands.checkpoint.views import verification

    lines, is_whole = verification(path, level.value)
    for line in lines:
        typer.echo(line)
    raise typer.Exit(0 if is_whole else 1)


def diff(
    first: PathArgument,
    second: Annotated[str, typer.Argument(metavar="PATH", callback=_IS_CHECKPOINT)],
    everything: Annotated[bool, typer.Option("--all", help="Every difference, not only the first.")] = False,
) -> None:
    """Print the first tensor or state in which two checkpoints differ; exit 1 if there is one."""
    from holdfast.checkpoint.format.verification import check_headers, verify_checkpoint
    from holdfast.checkpoint.inspect.compare import differences
    from holdfast.checkpoint.keep import find

    difference_count, both = 0, (find.one(first), find.one(second))
    for checkpoint in both:
        check_headers(checkpoint.storage, checkpoint.name, checkpoint.manifest)
    for line in differences(*both):
        typer.echo(line)
        difference_count += 1
        if not everything:
            break
    if not difference_count:
        for checkpoint in both:  # what was compared so far is what the manifests say
            verify_checkpoint(checkpoint.storage, checkpoint.name, "files")
        typer.echo("identical")
    raise typer.Exit(1 if difference_count else 0)


def export(  # noqa: PLR0913, PLR0917 - each is an option of the command
    checkpoint: PathArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory, or file with --format torch.")],
    form: Annotated[
        ExportForm,
        typer.Option(
            "--format",
            help="hf: for transformers. torch: one {model, optimizer} file. gguf: for llama.cpp. "
            "compressed-tensors: for vLLM.",
        ),
    ] = ExportForm.hf,
    tensor_type: Annotated[
        TensorType | None,
        typer.Option(
            "--type",
            help="gguf: f16, q8_0. compressed-tensors: fp8, int8.",
            show_default="f16, or fp8",
        ),
    ] = None,
    proof_rows: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Rows to prove a gguf or compressed-tensors on.",
            callback=IS_ROWS,
            show_default="the run's evaluation sets, filled up with fixed prompts",
        ),
    ] = None,
    reader: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            help="Of an environment with llama-cpp-python or vLLM, which reads it for the proof.",
            show_default="this one if it has it, else plain transformers",
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of floating-point tensors.")] = Dtype.same,
    shard_bytes: Annotated[int, typer.Option(min=1, help="Largest safetensors file.")] = 5_000_000_000,
    adapter: Annotated[bool, typer.Option("--adapter", help="Adapters alone, in peft's format.")] = False,
    ema: Annotated[
        bool, typer.Option("--ema", help="The averages that the run kept (optim.ema), not the weights.")
    ] = False,
    base: Base = None,
    trust_remote_code: TrustCode = False,
) -> None:
    """Write a model directory for transformers or for a program that serves it; exit 1 if that is not proved."""
    from holdfast.checkpoint.export.stored import export_stored, export_stored_adapter, write_torch_file
    from holdfast.checkpoint.keep import find

    _check_options(form, adapter=adapter, ema=ema, base=base)
    if form.is_served:
        if adapter or trust_remote_code or dtype is not Dtype.same:
            raise ConfigError(
                f"--format {form.value} writes merged weights of the families it knows, in the type that --type names; "
                "leave out --adapter, --dtype and --trust-remote-code."
            )
        named = None if tensor_type is None else tensor_type.value
        how = registry.load(registry.SERVED_EXPORT)(form.value, named, proof_rows, reader, ema, base)
        lines, is_proved = registry.load(registry.SERVED_FORMAT)(find.one(checkpoint), output, how)
        for line in lines:
            typer.echo(line)
        raise typer.Exit(0 if is_proved else 1)
    if (tensor_type, proof_rows, reader) != (None, None, None):
        raise ConfigError("--type, --proof-rows and --reader belong to --format gguf and compressed-tensors.")
    stored = find.one(checkpoint)
    if adapter:
        export_stored_adapter(stored, output, dtype=torch_dtype(dtype), averaged=ema)
    elif form is ExportForm.torch:
        write_torch_file(stored, output)
    else:
        export_stored(
            [stored],
            output,
            dtype=torch_dtype(dtype),
            largest_file_bytes=shard_bytes,
            trust_remote_code=trust_remote_code,
            averaged=ema,
            base=base,
        )
    typer.echo(f"{stored.path} is exported to {output}")


def _check_options(form: ExportForm, *, adapter: bool, ema: bool, base: Path | None) -> None:
    """Refuse options that name two exports.

    Raises:
        ConfigError: Some do.
    """
    if adapter and form is ExportForm.torch:
        raise ConfigError("--adapter writes a directory for peft, --format torch one file; give one of them.")
    if ema and form is ExportForm.torch:
        raise ConfigError(
            "--ema writes averages in the place of weights, --format torch all there is; give one of them."
        )
    if base is not None and (adapter or form is ExportForm.torch):
        raise ConfigError("--base names a model, and --adapter and --format torch read none; leave it out.")


def average(
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Checkpoints of one model.", callback=_IS_CHECKPOINT)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The model directory.")],
    dtype: Annotated[Dtype, typer.Option(help="Of floating-point tensors.")] = Dtype.same,
    base: Base = None,
    trust_remote_code: TrustCode = False,
) -> None:
    """Write the mean of several checkpoints' weights as a model directory; sums are taken in float64."""
    from holdfast.checkpoint.export.stored import export_stored
    from holdfast.checkpoint.keep import find

    stored = [find.one(path) for path in checkpoints]
    export_stored(stored, output, dtype=torch_dtype(dtype), trust_remote_code=trust_remote_code, base=base)
    typer.echo(f"the mean of {len(stored)} checkpoints is in {output}")


def prune(
    run: PathArgument,
    keep_last: Annotated[
        int | None, typer.Option(min=2, help="Newest checkpoints that stay.", show_default="as the run has it, else 3")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps that are a multiple of this stay.", show_default="as the run has it"),
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC", help="The best by this stays beside those the run keeps; may be repeated."),
    ] = None,
    mode: Mode = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
) -> None:
    """Delete older checkpoints; pinned ones, the newest verified one and what the run resumed from stay."""
    from holdfast.cli.commands.checkpoint.views import pruned

    for line in pruned(run, keep_last, keep_every, keep_best or [], mode, dry_run=dry_run):
        typer.echo(line)


def pin(
    run: PathArgument,
    step: Annotated[int, typer.Argument(min=0, help="The step to keep.")],
    remove: Annotated[bool, typer.Option("--remove", help="Let retention delete it again.")] = False,
) -> None:
    """Keep a checkpoint whatever retention says."""
    from holdfast.cli.commands.checkpoint.views import pinned

    typer.echo(pinned(run, step, remove=remove))
