"""`holdfast generate`: completions by plain transformers; no model and no engine of Holdfast takes part.

A model directory is read as it lies there, a hub name is downloaded, and a checkpoint is exported to a temporary
directory. Every prompt is tokenised for every model before a weight is read.
"""

# As cli/main.py, without `from __future__ import annotations`.
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from holdfast.cli.arguments import IS_ROWS, GenerationTargets, TrustCode
from holdfast.errors import ConfigError, DataError, HoldfastError, ModelError, UserError
from holdfast.text.escaping import escaped, escaped_paragraph
from holdfast.text.shortening import shortened

if TYPE_CHECKING:
    from holdfast.checkpoint.inspect.tensors import StoredCheckpoint

_SHOWN = 60
_USUAL_NEW_TOKENS = 128
_NONE_OF_THEM = (
    "none of what can be loaded: an export, a checkpoint, a run with a checkpoint, a Hugging Face directory, or a name "
    "on the hub"
)


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
    how = Decoding(chat, max_new_tokens, temperature, top_p, seed, trust_remote_code)
    try:
        prompts = _prompts(prompt or [], rows, column)
        with ExitStack() as stack:
            with redirect_stdout(sys.stderr):  # loaders tell of what they do where scripts read completions
                models = [stack.enter_context(_found(target, how)) for target in targets]
                loads = [_tokenised(model, prompts, how) for model in models]
            if as_json:
                _print_json(models, [list(load()) for load in loads])  # one model at a time is in memory
            elif targets[1:]:
                _print_table(models, [list(load()) for load in loads])
            else:
                _print_paragraphs(models[0], loads[0]())
    except UserError:
        raise
    except HoldfastError as error:  # damage, which for other commands is not a mistake of the user's
        raise UserError(str(error)) from error


Completion = dict[str, Any]
"""The prompt, the completion and its tokens, of which the last may be that of the end, as `--json` prints them."""


class Decoding(NamedTuple):
    """The options of a command."""

    chat: bool
    max_new_tokens: int | None
    temperature: float
    """0: the most probable token, always."""
    top_p: float
    seed: int
    trust_remote_code: bool


class PlainModel(NamedTuple):
    """A model directory, and the run that it is of."""

    directory: Path
    path: str
    """Path or hub name that was named or chosen."""
    run: str = ""
    run_id: str = ""
    step: int | None = None
    """None of a model that no run made."""

    @property
    def words(self) -> str:
        """Return path, run and step for a reader."""
        if self.step is None:
            return f"{self.path}: no export of a run"
        return f"{self.path}: run {self.run}{f' ({self.run_id})' if self.run_id else ''}, step {self.step}"


def _tokenised(model: PlainModel, prompts: Sequence[str], how: Decoding) -> Callable[[], Iterator[Completion]]:
    """Tokenise prompts, and return what loads the model and yields the completions as they are written.

    Raises:
        UserError: There is no tokenizer, or the model writes no text; a prompt has no tokens or too many, or the chat
            template refuses it.
    """
    from holdfast.config.sections.model import ModelConfig
    from holdfast.data.tokens.chat import PlainTokeniser
    from holdfast.models.files.origin import load_tokenizer

    config, kind = _described(model.directory, how)
    section = ModelConfig(path=str(model.directory), trust_remote_code=how.trust_remote_code)
    tokenizer = load_tokenizer(section, model.directory)
    plain, ready = PlainTokeniser(tokenizer, append_eos=False), []
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    for number, prompt in enumerate(prompts, start=1):
        which = f"{model.path}: prompt {number} of {len(prompts)}"
        tokens = _as_a_turn(tokenizer, prompt, which) if how.chat else plain.opening(prompt)
        if not tokens:
            raise UserError(f"{which} has no tokens: the tokenizer makes nothing of {prompt[:60]!r}.")
        ready.append((prompt, tokens, _new_tokens(which, len(tokens), positions, how.max_new_tokens)))

    def load() -> Iterator[Completion]:
        with redirect_stdout(sys.stderr):
            weights = _loaded(model.directory, kind, how)
        return _completions(weights, model.directory, tokenizer, ready, how)

    return load


def _described(directory: Path, how: Decoding) -> tuple[Any, Any]:
    """Return a model's configuration and its class in transformers, which is None of one that brings its own.

    Raises:
        UserError: It brings code that may not run, writes no text, or lacks a tokenizer.
    """
    import transformers

    from holdfast.models.files.origin import read_config

    config = read_config(directory, trust_remote_code=how.trust_remote_code)
    kind = getattr(transformers, str((config.architectures or ["none"])[0]), None)
    if kind is not None and not kind.can_generate():
        raise ModelError(f"{directory} holds a {kind.__name__}, which writes no text. Name a causal language model.")
    if not any((directory / name).exists() for name in ("tokenizer_config.json", "tokenizer.json")):
        raise ModelError(
            f"{directory} has no tokenizer: neither tokenizer.json nor tokenizer_config.json is there. Copy one from "
            "the model that it was trained from."
        )
    return config, kind


def _new_tokens(which: str, length: int, positions: int | None, requested: int | None) -> int:
    """Return how many tokens may follow a prompt of so many."""
    if not positions:
        return requested or _USUAL_NEW_TOKENS
    room = positions - length
    if room < (requested or 1):
        more = f" and --max-new-tokens {requested}" if requested and room > 0 else ""
        raise UserError(
            f"{which} is too long: its {length} tokens{more} do not fit into the {positions} positions of the model "
            "(max_position_embeddings). Shorten it, or ask for fewer tokens."
        )
    return requested or min(_USUAL_NEW_TOKENS, room)


def _as_a_turn(tokenizer: Any, prompt: str, which: str) -> list[int]:
    from holdfast.data.content.formats import Conversation
    from holdfast.data.tokens.chat_template import ChatTemplate, TemplateRefuses

    template = ChatTemplate(tokenizer, None, {}, "the tokenizer's chat template")
    try:
        template.check()
        return template.ids(Conversation([{"role": "user", "content": prompt}]), generation_prompt=True)
    except TemplateRefuses as error:
        raise UserError(
            f"{which} cannot be written as a conversation: {error}. Leave out --chat to complete it as it is."
        ) from error


def _completions(
    model: Any, directory: Path, tokenizer: Any, ready: Sequence[tuple[str, list[int], int]], how: Decoding
) -> Iterator[Completion]:
    """Complete prompts, each of which stands with its tokens and the number that may follow."""
    import torch
    import transformers

    from holdfast.models.files.origin import read_end_tokens

    named = (read_end_tokens(directory), model.config.get_text_config().eos_token_id, tokenizer.eos_token_id)
    ends = next((each for each in named if each is not None), None)
    several = ends if isinstance(ends, list) else [ends]
    options: dict[str, Any] = {"eos_token_id": ends, "pad_token_id": several[0], "do_sample": how.temperature > 0}
    if how.temperature > 0:
        # 0 switches transformers' own choice of 50 off: what is not asked for does not happen.
        options |= {"temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
    transformers.set_seed(how.seed)
    for prompt, ids, count in ready:
        tokens = torch.tensor([ids], device=model.device)
        config = transformers.GenerationConfig(max_new_tokens=count, **options)
        with torch.no_grad():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
        added = out[0, len(ids) :].tolist()
        text = tokenizer.decode(added, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        numbers = {"prompt_tokens": len(ids), "tokens": added, "finished": bool(added) and added[-1] in several}
        yield {"prompt": prompt, "completion": text, **numbers}


def _loaded(directory: Path, kind: Any, how: Decoding) -> Any:
    """Load weights by plain transformers.

    Raises:
        ModelError: transformers cannot load them, or a tensor is missing.
    """
    import torch
    import transformers
    from safetensors import SafetensorError

    from holdfast.models.files.configuration import refusals

    transformers.utils.logging.disable_progress_bar()
    make, trust = kind, {}
    if kind is None:
        make, trust = transformers.AutoModelForCausalLM, {"trust_remote_code": how.trust_remote_code}
    try:
        with refusals(f"transformers cannot load {directory}"):
            model, loading = make.from_pretrained(directory, dtype="auto", output_loading_info=True, **trust)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"transformers cannot load {directory}: {' '.join(str(error).split())[:500]}") from error
    # transformers fills what no file holds with random values, and warns.
    if missing := sorted(loading["missing_keys"]):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        which = f"{missing[0]}{more}, which a {type(model).__name__} needs"
        raise ModelError(f"{directory} has no values for {which}. Fetch its weights again.")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _found(target: str, how: Decoding) -> Iterator[PlainModel]:
    """Find a model directory, or make one of a checkpoint for the length of a block; a run's weights are verified.

    Raises:
        UserError: Nothing there can be loaded.
    """
    from holdfast.checkpoint.export.about import ABOUT_FILE
    from holdfast.checkpoint.export.stored import export_stored
    from holdfast.checkpoint.keep import find
    from holdfast.config.load import EXPORTED_CONFIG
    from holdfast.training.directory import IDENTITY

    path = Path(target)
    is_ours = any((path / name).exists() for name in (IDENTITY, "manifest.json"))
    is_model = not is_ours and any((path / name).exists() for name in ("config.json", ABOUT_FILE, EXPORTED_CONFIG))
    if is_model or not (path.is_dir() or "://" in target):
        yield _directory(target, how)
        return
    try:
        stored = find.one(target)
    except HoldfastError as error:
        if is_ours or "://" in target or path.name.startswith("step-"):
            raise  # what is wrong with it is best said by what reads checkpoints
        raise UserError(f"{target} is {_NONE_OF_THEM}. {error}") from error
    if (model := _same_export(stored)) is not None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-generate-") as folder:
        export = Path(folder) / "export"
        export_stored([stored], export, trust_remote_code=how.trust_remote_code)
        yield _at(export, str(stored.path))


def _directory(target: str, how: Decoding) -> PlainModel:
    from holdfast.config.sections.model import ModelConfig
    from holdfast.models.files.origin import locate

    section = ModelConfig(path=target, trust_remote_code=how.trust_remote_code)
    try:
        directory = locate(target, section, Path.cwd(), weights=True)
    except ModelError as error:
        raise error if Path(target).is_dir() else UserError(f"{target} is {_NONE_OF_THEM}. {error}") from error
    return _at(Path(target) if Path(target).is_dir() else directory, target)


def _at(directory: Path, path: str) -> PlainModel:
    """Return the model in a directory.

    Raises:
        ModelError: Its weights are not those that were exported, or it holds adapters alone.
    """
    from holdfast.checkpoint.export.about import check_weights, read_about
    from holdfast.config.load import EXPORTED_CONFIG

    about = read_about(directory)
    if (directory / "adapter_config.json").exists() and (about or (directory / EXPORTED_CONFIG).exists()):
        raise ModelError(
            f"{path} holds adapters alone. Name the merged export beside it, or the checkpoint that it was made of."
        )
    if about is None:
        return PlainModel(directory, path)
    check_weights(directory, about, by_hash=True)
    return PlainModel(directory, path, about.run, about.run_id, about.step)


def _same_export(stored: "StoredCheckpoint") -> PlainModel | None:
    """Return an export of the checkpoint's own weights that its run has made already."""
    from holdfast.checkpoint.export.about import read_about

    wanted = (stored.manifest.run_id, stored.manifest.step, "trained", 0)
    for export in sorted((Path(stored.storage.root).parent / "exports").glob("[!.]*")):
        try:
            about = read_about(export)
            if about is not None and (about.run_id, about.step, about.weights, len(about.steps)) == wanted:
                return _at(export, str(export))
        except ModelError:  # damaged, or adapters alone: the checkpoint may be whole
            continue
    return None


def _prompts(prompts: Sequence[str], rows: str | None, column: str) -> list[str]:
    """Return what is to be completed.

    Raises:
        UserError: There is nothing, there are two sources of prompts, or a prompt is empty.
    """
    if prompts and rows is not None:
        raise ConfigError("--prompt and --rows both name prompts; give one of them.")
    prompts = list(_from_rows(rows, column)) if rows is not None else list(prompts) or [_from_input()]
    for number, prompt in enumerate(prompts, start=1):
        which = f"Prompt {number} of {len(prompts)}"
        if not prompt:
            raise UserError(f"{which} is empty. Give a text to complete.")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise UserError(f"{which} is no UTF-8 text: {escaped(shortened(prompt, _SHOWN))}.")
    return prompts


def _from_input() -> str:
    # What is no UTF-8 becomes surrogates, which are refused in a prompt.
    terminal = sys.stdin is None or sys.stdin.isatty()
    line = "" if terminal else sys.stdin.buffer.readline().decode("utf-8", "surrogateescape")
    if not line:
        raise UserError(
            "holdfast generate needs a prompt: --prompt TEXT, --rows FILE, or a line on standard input, which is "
            f"{'a terminal' if terminal else 'empty'}."
        )
    return line.rstrip("\r\n")


def _from_rows(path: str, column: str) -> Iterator[str]:
    from holdfast.config.sections.data import SourceConfig
    from holdfast.data.rows.files import find_local, split_off
    from holdfast.data.rows.rows import open_source

    here = Path.cwd()
    if not find_local(split_off(path, here)[0], here):
        raise DataError(f"--rows {path}: there is no such file.")
    for number, row in enumerate(open_source(SourceConfig(path=path, name=path), here).scan(0)):
        prompt = row.get(column)
        if not isinstance(prompt, str):
            has = f"has {type(prompt).__name__} there" if column in row else f"has {', '.join(map(str, row))}"
            raise DataError(f"{path}, row {number}: no text is in column {column!r}; it {has}. Name one by --column.")
        yield prompt


def _print_json(models: Sequence[PlainModel], written: Sequence[Sequence[Completion]]) -> None:
    heads = [{"path": model.path, "run": model.run, "run_id": model.run_id, "step": model.step} for model in models]
    objects = [{**head, "completions": completions} for head, completions in zip(heads, written, strict=True)]
    print(json.dumps({"models": objects} if objects[1:] else objects[0], indent=2), flush=True)


def _print_paragraphs(model: PlainModel, completions: Iterator[Completion]) -> None:
    print(escaped(model.words), flush=True)
    for completion in completions:
        print(f"--- {escaped(shortened(completion['prompt'], _SHOWN))}", flush=True)
        print(escaped_paragraph(completion["completion"]), flush=True)


def _print_table(models: Sequence[PlainModel], written: Sequence[Sequence[Completion]]) -> None:
    """Print a line per prompt and a column per model."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("prompt", show_lines=True)
    for model in models:
        table.add_column(Text(escaped(model.words)), overflow="fold")
    for of_prompt in zip(*written, strict=True):
        prompt = Text(escaped(shortened(of_prompt[0]["prompt"], _SHOWN)))
        table.add_row(prompt, *(Text(escaped_paragraph(completion["completion"])) for completion in of_prompt))
    Console().print(table)
