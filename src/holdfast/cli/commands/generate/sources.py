"""`holdfast generate`: completions of models, by plain transformers over an export or any Hugging Face directory.

A directory is read as it lies there, and a hub name is downloaded. Of a checkpoint an export is made in a temporary
directory, as `holdfast checkpoint export` makes it. Every prompt is tokenised for every model before a weight is read,
and every refusal is one paragraph.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.commands.generate.plain_generation import (
    Completion,
    CompletionRequest,
    TokenizedPrompt,
    load_model,
    load_words,
    tokenised_prompts,
)
from holdfast.config.load import EXPORTED_CONFIG
from holdfast.errors import ConfigError, DataError, HoldfastError, ModelError, UserError
from holdfast.text.escaping import escaped, escaped_paragraph
from holdfast.text.shortening import shortened
from holdfast.training.directory import IDENTITY

if TYPE_CHECKING:
    from holdfast.checkpoint.export.about import Exported
    from holdfast.checkpoint.inspect.tensors import StoredCheckpoint

_SHOWN = 60
_NONE_OF_THEM = (
    "none of what can be loaded: an export, a checkpoint, a run with a checkpoint, a Hugging Face directory, or a name "
    "on the hub"
)


@dataclass(frozen=True)
class ModelSource:
    """A model directory that can be loaded, and the run it is of."""

    directory: Path
    run_id: str
    run: str
    step: int | None
    """None of a model that no run made."""
    of: str
    """Path or hub name that was named or chosen."""

    @property
    def words(self) -> str:
        """Return run and step for a reader."""
        if self.step is None:
            return f"{self.of}: no export of a run"
        return f"{self.of}: run {self.run}{f' ({self.run_id})' if self.run_id else ''}, step {self.step}"


def generate(targets: Sequence[str], request: CompletionRequest, *, as_json: bool) -> None:
    """Print what is loaded, and a completion per prompt; of several models, side by side.

    Raises:
        UserError: A target is none that can be loaded, its weights are damaged, or a prompt cannot be completed.
    """
    try:
        prompts = _prompts(request)
        with ExitStack() as stack:
            # Loaders tell of what they do where completions are read by scripts.
            with redirect_stdout(sys.stderr):
                sources = [stack.enter_context(_source(target, request)) for target in targets]
                tokenised = [_tokenised(source, prompts, request, len(sources)) for source in sources]
            if len(sources) == 1:
                _print_one(sources[0], _completions(sources[0], tokenised[0], request), as_json=as_json)
            else:
                # One model at a time is in memory.
                written = [list(_completions(*pair, request)) for pair in zip(sources, tokenised, strict=True)]
                _print_several(sources, written, as_json=as_json)
    except UserError:
        raise
    except HoldfastError as error:  # damage, which for other commands is not a mistake of the user's
        raise UserError(str(error)) from error


def _tokenised(
    source: ModelSource, prompts: Sequence[str], request: CompletionRequest, models: int
) -> tuple[Any, list[TokenizedPrompt]]:
    """Return a model's tokenizer, and the prompts as the model reads them; a refusal names which of several models."""
    config, tokenizer = load_words(source.directory, trust_remote_code=request.trust_remote_code)
    try:
        return tokenizer, tokenised_prompts(config, tokenizer, prompts, request)
    except UserError as error:
        if models == 1:
            raise
        raise UserError(f"{source.of}: {error}") from error


def _completions(
    source: ModelSource, tokenised: tuple[Any, list[TokenizedPrompt]], request: CompletionRequest
) -> Iterator[Completion]:
    """Load a model, and yield its completions as they are written."""
    tokenizer, ready = tokenised
    with redirect_stdout(sys.stderr):
        complete = load_model(source.directory, tokenizer, request)
    return map(complete, ready)


def _as_object(source: ModelSource, completions: Iterable[Completion]) -> dict[str, Any]:
    head = {"path": source.of, "run": source.run, "run_id": source.run_id, "step": source.step}
    return {**head, "completions": [vars(completion) for completion in completions]}


def _print_one(source: ModelSource, completions: Iterator[Completion], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_object(source, completions), indent=2), flush=True)
        return
    print(escaped(source.words), flush=True)
    for completion in completions:
        print(f"--- {escaped(shortened(completion.prompt, _SHOWN))}", flush=True)
        print(escaped_paragraph(completion.completion), flush=True)


def _print_several(sources: Sequence[ModelSource], written: Sequence[Sequence[Completion]], *, as_json: bool) -> None:
    """Print a table with a line per prompt and a column per model."""
    if as_json:
        models = [_as_object(*pair) for pair in zip(sources, written, strict=True)]
        print(json.dumps({"models": models}, indent=2), flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("prompt", show_lines=True)
    for source in sources:
        table.add_column(Text(escaped(source.words)), overflow="fold")
    for completions in zip(*written, strict=True):
        prompt = Text(escaped(shortened(completions[0].prompt, _SHOWN)))
        table.add_row(prompt, *(Text(escaped_paragraph(completion.completion)) for completion in completions))
    Console().print(table)


def _prompts(request: CompletionRequest) -> list[str]:
    """Return what is to be completed.

    Raises:
        UserError: There is nothing, there are two sources of prompts, or a prompt is empty.
    """
    if request.prompts and request.rows is not None:
        raise ConfigError("--prompt and --rows both name prompts; give one of them.")
    if request.rows is not None:
        prompts = _from_rows(request.rows, request.column)
    else:
        prompts = list(request.prompts) or [_from_input()]
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise UserError(f"Prompt {number} of {len(prompts)} is empty. Give a text to complete.")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise UserError(
                f"Prompt {number} of {len(prompts)} is no UTF-8 text: {escaped(shortened(prompt, _SHOWN))}."
            )
    return prompts


def _from_input() -> str:
    usage = "holdfast generate needs a prompt: --prompt TEXT, --rows FILE, or a line on standard input."
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError(usage)
    try:
        line = sys.stdin.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Standard input cannot be read: {error}. {usage}") from error
    if not line:
        raise UserError(f"Standard input is empty. {usage}")
    return line.rstrip("\r\n")


def _from_rows(path: str, column: str) -> list[str]:
    from holdfast.data.rows.files import files_of_split, find_local, split_off

    name, split = split_off(path, Path.cwd())
    files = find_local(name, Path.cwd())
    if not files:
        raise DataError(f"--rows {path}: there is no such file.")
    prompts = []
    for number, row in enumerate(_rows(files_of_split(files, split, path))):
        prompt = row.get(column)
        if not isinstance(prompt, str):
            has = f"has {type(prompt).__name__} there" if column in row else f"has {', '.join(map(str, row))}"
            raise DataError(f"{path}, row {number}: no text is in column {column!r}; it {has}. Name one by --column.")
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path} has no rows.")
    return prompts


def _rows(files: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    from holdfast.data.rows.rows import open_files

    rows = open_files(files)
    return (rows[index] for index in range(len(rows)))


@contextmanager
def _source(target: str, request: CompletionRequest) -> Iterator[ModelSource]:
    """Find a model directory, or make one of a checkpoint for the length of a block; a run's weights are verified."""
    from holdfast.checkpoint.export.stored import export_stored
    from holdfast.checkpoint.keep import find

    source = _export(Path(target)) or _plain(target, request)
    if source is not None:
        yield source
        return
    try:
        stored = find.one(target)
    except HoldfastError as error:
        if "://" in target or _looks_like_ours(Path(target)):
            raise
        raise UserError(f"{target} is {_NONE_OF_THEM}. {error}") from error
    manifest = stored.manifest
    if (source := _same_export(stored)) is not None:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-generate-") as folder:
        export = Path(folder) / "export"
        export_stored([stored], export, trust_remote_code=request.trust_remote_code)
        about = _about(export)
        yield ModelSource(export, manifest.run_id, "" if about is None else about.run, manifest.step, str(stored.path))


def _plain(target: str, request: CompletionRequest) -> ModelSource | None:
    """Return a Hugging Face directory, downloaded where a hub's name was given; None for what only a run writes.

    Raises:
        UserError: There is neither such a directory nor such a name on the hub.
    """
    from holdfast.config.sections.model import ModelConfig
    from holdfast.models.files.origin import locate

    path = Path(target)
    if "://" in target or (path.is_dir() and (_looks_like_ours(path) or not (path / "config.json").exists())):
        return None
    if path.exists() and not path.is_dir():
        raise UserError(f"{target} is {_NONE_OF_THEM}: it is no directory.")
    section = ModelConfig(path=target, trust_remote_code=request.trust_remote_code)
    try:
        directory = locate(target, section, Path.cwd(), weights=True)
    except ModelError as error:
        raise error if path.is_dir() else UserError(f"{target} is {_NONE_OF_THEM}. {error}") from error
    return ModelSource(directory, "", "", None, target)


def _looks_like_ours(path: Path) -> bool:
    """Return whether what is wrong with a path is best said by whoever reads checkpoints."""
    return (path / IDENTITY).exists() or (path / "manifest.json").exists() or path.name.startswith("step-")


def _about(directory: Path) -> Exported | None:
    from holdfast.checkpoint.export.about import read_about

    return read_about(directory)


def _export(path: Path) -> ModelSource | None:
    """Return the export at a path, None where there is none.

    Raises:
        ModelError: Its weights are not those that were exported, or it holds adapters alone.
    """
    from holdfast.checkpoint.export.about import check_weights
    from holdfast.models.files.origin import refuse_others_than_files

    if not path.is_dir() or (path / "manifest.json").exists() or (path / IDENTITY).exists():
        return None
    about = _about(path)
    if about is None and not (path / EXPORTED_CONFIG).exists():
        return None
    if (path / "adapter_config.json").exists():
        raise ModelError(
            f"{path} holds adapters alone. Name the merged export beside it, or the checkpoint that it was made of."
        )
    refuse_others_than_files(path)
    if about is None:
        return ModelSource(path, "", "", None, str(path))
    check_weights(path, about, by_hash=True)
    return ModelSource(path, about.run_id, about.run, about.step, str(path))


def _same_export(stored: StoredCheckpoint) -> ModelSource | None:
    """Return an export of the checkpoint's own weights that its run has made already."""
    manifest = stored.manifest
    for export in sorted((Path(stored.storage.root).parent / "exports").glob("[!.]*")):
        if (export / "adapter_config.json").exists():
            continue
        try:
            about = _about(export)
            if about is None or (about.run_id, about.step) != (manifest.run_id, manifest.step):
                continue
            if about.weights == "trained" and not about.steps:
                return _export(export)
        except ModelError:  # damaged: the checkpoint may be whole
            continue
    return None
