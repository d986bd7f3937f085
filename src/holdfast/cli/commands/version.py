"""`holdfast version`."""

# As cli/main.py, without `from __future__ import annotations`.
import typer


def version() -> None:
    """Print the versions that decide a run's numbers."""
    from holdfast.config.versions import versions

    for name, number in versions().items():
        typer.echo(f"{name} {number}")
