"""`holdfast generate`: completions by plain transformers."""

# As cli/main.py, without `from __future__ import annotations`.
from typing import Annotated

import typer

from holdfast.cli.arguments import IS_ROWS, GenerationTargets, TrustCode


def generate(  # noqa: PLR0913, PLR0917 - each is an option of the command
    targets: GenerationTargets,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="To complete; may be repeated.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a user in the model's chat template.")] = False,
    rows: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts: JSON lines, JSON or parquet.", callback=IS_ROWS)
    ] = None,
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
    """Complete prompts with models, by plain transformers; without a prompt, a line of standard input."""
    from holdfast.cli.commands.generate.plain_generation import CompletionRequest
    from holdfast.cli.commands.generate.sources import generate as complete

    decoding = (max_new_tokens, temperature, top_p, seed)
    complete(
        targets, CompletionRequest(prompt or [], rows, column, chat, *decoding, trust_remote_code), as_json=as_json
    )
