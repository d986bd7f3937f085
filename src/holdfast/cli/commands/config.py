"""`holdfast config`: look at a configuration."""

# As cli/main.py, without `from __future__ import annotations`.
import json
from typing import Annotated

import typer

from holdfast.cli.arguments import Configuration, Overrides, RunFile
from holdfast.config.base import differing, leaves
from holdfast.config.verbs.roots import ROOTS, load_run
from holdfast.config.verbs.training import as_plain
from holdfast.config.yaml12 import to_yaml
from holdfast.errors import ConfigError


def config_show(
    run: RunFile,
    overrides: Overrides = None,
    short: Annotated[bool, typer.Option("--short", help="Print only what differs from the defaults.")] = False,
) -> None:
    """Print the whole tree, defaults included."""
    config = load_run(run, overrides or []).config
    typer.echo(to_yaml(differing(config) if short else as_plain(config)), nl=False)


def config_schema(verb: Annotated[str, typer.Argument(help="Which verb's tree.")] = "sft") -> None:
    """Print the tree's JSON schema, for editors and agents."""
    typer.echo(schema(verb))


def config_diff(
    first: Configuration,
    second: Configuration,
) -> None:
    """Print the keys in which two runs differ; exit 1 if they do."""
    files = (path / "config.resolved.yaml" if path.is_dir() else path for path in (first, second))
    first_leaves, second_leaves = (dict(leaves(as_plain(load_run(file, []).config))) for file in files)
    are_same = True
    for key in sorted(set(first_leaves) | set(second_leaves)):
        a, b = first_leaves.get(key, "(absent)"), second_leaves.get(key, "(absent)")
        if a != b and key != "run.name":
            typer.echo(f"{key}: {a} -> {b}")
            are_same = False
    raise typer.Exit(0 if are_same else 1)


def schema(verb: str) -> str:
    """Return a verb's JSON schema.

    Raises:
        ConfigError: There is no such verb.
    """
    if verb not in ROOTS:
        raise ConfigError(f"There is no verb {verb!r} with a configuration; there are {', '.join(ROOTS)}.")
    return json.dumps(ROOTS[verb].model_json_schema(), indent=2)
