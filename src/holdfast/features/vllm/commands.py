"""`holdfast serve`."""

# As cli/main.py, without `from __future__ import annotations`.
import typer

from holdfast.cli.arguments import Overrides, RunFile


def serve(run: RunFile, overrides: Overrides = None) -> None:
    """Start the servers of vLLM that a run samples from, until Ctrl-C or SIGTERM; weights come from the run."""
    from holdfast.features.vllm.serving import serve as serve_run

    raise typer.Exit(serve_run(run, overrides or []))
