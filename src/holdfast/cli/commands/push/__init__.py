"""`holdfast push`: an exported model to the hub."""

# As cli/main.py, without `from __future__ import annotations`.
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.arguments import takes
from holdfast.config.path_kinds import PathKind


def push(
    export: Annotated[
        Path,
        typer.Argument(
            metavar="EXPORT",
            help="The directory of an exported model.",
            callback=takes(PathKind.EXPORT, PathKind.ADAPTER),
        ),
    ],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="On the hub; made if it is not there.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; default: private.")] = False,  # noqa: FBT002 - typer's way
    overwrite: Annotated[  # noqa: FBT002 - typer's way
        bool, typer.Option("--overwrite", help="Replace files that the repository has with other contents.")
    ] = False,
) -> None:
    """Upload an exported model to the Hugging Face hub, privately, and verify what arrived."""
    from holdfast.cli.commands.push.upload import push as push_export

    for line in push_export(export, repository, public=public, overwrite=overwrite):
        typer.echo(line)
