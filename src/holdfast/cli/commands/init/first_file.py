"""`holdfast init`: writes a first configuration from a model's files and the first rows of the data."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import typer

from holdfast.config.load import from_mapping
from holdfast.config.sections.data import SourceConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import to_yaml
from holdfast.errors import ConfigError, DataError
from holdfast.text.numbers import number_as_text

if TYPE_CHECKING:
    from holdfast.data.rows.rows import Row
    from holdfast.data.survey import Survey

_LOOKED_AT, _MANY = 500, 200
"""Rows that columns and lengths are taken from; rows from which on some are held out."""
_LARGE = 100_000_000
_ROOM, _MICRO_BATCH = 256, 4096
"""Tokens a policy writes at most, where the model has positions for them; tokens of one forward pass."""
_BYTES_PER_WEIGHT, _BYTES_PER_FROZEN_WEIGHT = 16, 4
"""In float32: weight, gradient and two moments of AdamW; a weight alone."""
_RATES = {
    "sft": {"small": 2e-4, "large": 2e-5, "adapters": 2e-4},
    "dpo": {"small": 1e-5, "large": 1e-6, "adapters": 1e-5},
    "reward": {"small": 1e-4, "large": 1e-5, "adapters": 1e-4},
    "grpo": {"small": 1e-5, "large": 1e-6, "adapters": 2e-5},
    "distill": {"small": 1e-4, "large": 1e-5, "adapters": 1e-4},
}
"""Peak learning rates by verb; large: from 0.1B weights on."""

_CALLED = {
    "prompt": ("prompt", "question", "problem", "instruction", "query", "input"),
    "completion": ("completion", "response", "answer", "output", "solution", "target"),
    "chosen": ("chosen", "preferred", "accepted", "good", "better", "winner"),
    "rejected": ("rejected", "dispreferred", "bad", "worse", "loser"),
    "label": ("label",),
    "messages": ("messages", "conversation", "dialogue"),
    "text": ("text", "content"),
}
"""Our columns, and what files call them; the first name that is there counts."""
_GOLD = ("answer", "ground_truth", "solution", "gold", "target", "output", "completion", "response")
_IMAGES = re.compile(r"(image|img|picture|photo)s?(_(path|file)s?)?")
_IMAGE_FILES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"}

_NUMBER = re.compile(r"(?s).*####\s*-?[\d.,]+\s*|\s*-?[\d.,]+\s*|.*\\boxed\{.*|.*\$.*")
"""An answer that mathematics can be asked about: a number, one behind ####, LaTeX."""


def write_first_file(
    verb: str | None, model: str | None, data: str | None, output: Path, teacher: str | None = None
) -> None:
    """Write a run's YAML; what a terminal can answer is asked there, and nowhere else.

    Raises:
        UserError: Something is missing or cannot be read, or the file is there already; nothing is written then.
    """
    if output.exists():
        raise ConfigError(f"{output} is there already. Name another file with --output, or remove it.")
    model = model or _asked("A model's directory or its name on the hub", "--model")
    data = data or _asked("A file of rows, a directory of them or a name on the hub", "--data")
    if verb == DistillConfig.verb:
        teacher = teacher or _asked("The model to learn from: a directory or a name on the hub", "--teacher")
    draft = suggest(verb, (model, teacher), data, Path.cwd(), output.stem)
    output.write_text(draft.text(), encoding="utf-8")
    for line in draft.lines():
        typer.echo(line)
    look = f"wrote {output}. Look at all rows with `holdfast data check {output}`, start with:"
    typer.echo(f"{look}\n  holdfast {draft.verb} {output}")


def _asked(question: str, option: str) -> str:
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} is needed: name it with {option}.")
    return str(typer.prompt(question))


@dataclass
class FirstFile:
    """A configuration that is being composed."""

    verb: str
    tree: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    """By dotted key: why it has its value."""

    def put(self, key: str, value: Any, reason: str) -> None:
        """Set a key, and say why."""
        section, _, name = key.rpartition(".")
        (self.tree.setdefault(section, {}) if section else self.tree)[name] = value
        self.reasons[key] = reason

    def lines(self) -> Iterator[str]:
        """Yield what was decided and why."""
        for key, reason in self.reasons.items():
            section, _, name = key.rpartition(".")
            yield f"{key} = {(self.tree[section] if section else self.tree)[name]}: {reason}"

    def text(self) -> str:
        """Return the YAML: every key that was decided stands below its reason."""
        lines = [f"# holdfast {self.verb} THIS_FILE"]
        path: list[str] = []
        for line in to_yaml(self.tree).splitlines():
            indent = line[: len(line) - len(line.lstrip())]
            path = [*path[: len(indent) // 2], line.strip().partition(":")[0]]
            reason = self.reasons.get(".".join(path))
            lines += [f"{indent}# {reason}", line] if reason else [line]
        return "\n".join(lines) + "\n"


def suggest(verb: str | None, models: tuple[str, str | None], data: str, base: Path, name: str) -> FirstFile:
    """Return a configuration for rows and a model.

    Args:
        verb: Default: what the rows are for.
        models: What is trained, and the teacher that a distillation has.
        data: The rows.
        base: Where paths begin.
        name: Of the run.

    Raises:
        UserError: The rows or the model cannot be read, or these rows are not for this verb.
    """
    if verb is not None and verb not in ROOTS:
        raise ConfigError(f"There is no first file for {verb!r}; there are {', '.join(ROOTS)}.")
    model, teacher = models
    if teacher is not None and verb not in {None, DistillConfig.verb}:
        raise ConfigError(f"`holdfast {verb}` has no teacher. Leave --teacher out, or use distill.")
    from holdfast.data.rows.rows import open_source

    rows = list(islice(open_source(SourceConfig(path=data), base).scan(0), _LOOKED_AT))
    if not rows:
        raise DataError(f"{data} has no rows, so nothing can be learned from them about a run.")
    columns = {ours: theirs for ours, names in _CALLED.items() if (theirs := _column(rows[0], names))}
    if verb is None:
        has_pairs = {"chosen", "rejected"} <= columns.keys() or {"label", "completion"} <= columns.keys()
        verb = DistillConfig.verb if teacher is not None else "dpo" if has_pairs else "sft"
    taught = {} if teacher is None else {"teacher": {"path": teacher}}
    draft = FirstFile(verb, {"run": {"name": name}, "model": {"path": model}, **taught, "data": {"path": data}})
    needed = _needed(verb, columns, list(rows[0]))
    _choose_objective(draft, needed, rows)
    survey = _choose_columns(draft, base, rows, needed)
    positions = _choose_method(draft, base, teacher)
    _choose_length(draft, survey, positions, len(rows))
    _choose_steps(draft, len(rows))
    return draft


def _column(row: Row, names: Sequence[str], without: Sequence[str] = ()) -> str | None:
    """Return the first of some names that a row's columns have, whatever their case."""
    lower = {column.lower(): column for column in row if column not in without}
    return next((lower[name] for name in names if name in lower), None)


def _needed(verb: str, columns: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return which of our columns a verb reads, and what the file calls them.

    Raises:
        DataError: Some are not there.
    """
    prompt = ["prompt"] if "prompt" in columns else []
    pairs, text = [*prompt, "chosen", "rejected"], [] if prompt else [["text"]]
    shapes = {
        "sft": [["messages"], *text, ["prompt", "completion"]],
        "dpo": [pairs, ["prompt", "completion", "label"], pairs],
        "reward": [pairs],
        "grpo": [["prompt"], ["messages"], ["prompt"]],
        "distill": [["messages"], *text, ["prompt", "completion"], ["prompt"]],
    }[verb]
    # Where none is there as a whole, the last one is asked for.
    shape = next((shape for shape in shapes if columns.keys() >= set(shape)), shapes[-1])
    missing = [ours for ours in shape if ours not in columns]
    if missing:
        unused = [name for name in names if name not in {columns.get(ours) for ours in shape}]
        theirs = {**columns, **dict(zip(missing, unused, strict=False))}
        advice = f"There is no column for {' and '.join(missing[len(unused) :])}: add it to the rows."
        if len(unused) >= len(missing):
            renamed = ", ".join(f"{ours}: {theirs[ours]}" for ours in shape if theirs[ours] != ours)
            advice = (
                f"Write a file by hand and name them, as in data.columns={{{renamed}}}, or rename them in the rows."
            )
        raise DataError(
            f"Rows for `holdfast {verb}` need {' and '.join(shape)}; there are the columns {', '.join(names)}. {advice}"
        )
    return {ours: columns[ours] for ours in shape}


def _choose_objective(draft: FirstFile, needed: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Choose what is optimised.

    Raises:
        DataError: No column says which completion of a policy is right.
    """
    if draft.verb == "dpo":
        kind, reason = "dpo", "rows have two answers each"
        if "label" in needed:
            kind, reason = "kto", "rows have one answer and a label each, not pairs"
        draft.put("preference.loss", kind, reason)
    elif draft.verb == "distill" and list(needed) == ["prompt"]:
        draft.put("rollout.share", 1.0, "rows have no answers, so the student writes them and the teacher judges")
    elif draft.verb == "reward":
        draft.put("preference.loss", "bradley_terry", "the answer that is preferred is to score higher")
    elif draft.verb == "grpo":
        gold = _column(rows[0], _GOLD, [*needed.values(), *_image_columns(rows[0])])
        if gold is None:
            raise DataError(
                f"Nothing in the columns {', '.join(rows[0])} says which completion is right. Write a reward function "
                "and name it in a file by hand: reward: [my_reward.py:score]."
            )
        answers = [str(number_as_text(row[gold])) for row in rows if row.get(gold) is not None]
        share = sum(_NUMBER.fullmatch(answer) is not None for answer in answers) / max(len(answers), 1)
        kind = "math" if share > 0.5 else "exact"
        rule = "the final answer is compared as mathematics" if kind == "math" else "the completion must be the answer"
        draft.put("reward", [{"kind": kind, "column": gold}], f"{share:.0%} of {gold} are numbers or formulas: {rule}")
        draft.put("rollout.group_size", 8, "completions of each prompt, compared with each other")


def _choose_columns(draft: FirstFile, base: Path, rows: Sequence[Row], needed: Mapping[str, str]) -> Survey:
    """Name the columns that the file calls otherwise; texts become a user's turns where a chat template can write them.

    Joined as they stand, a question and its answer would have nothing between them.

    Raises:
        UserError: The model has no tokenizer, or the rows cannot be read.
    """
    asks = needed.get("prompt") if isinstance(rows[0].get(needed.get("prompt", "")), str) else None
    media = _choose_images(draft, base, rows, asks)
    survey, why = None, ""
    if asks is not None:
        why = _why_no_turns(draft, base, asks, rows)
        if not why:
            survey, why = _as_turns(draft, base, asks, rows, {**needed, **media})
        if survey is None:
            alone = "prompts go to the model" if draft.verb == "grpo" else "prompt and answer are joined"
            why += f", so {alone} as they stand"
    if survey is None:
        _put_columns(draft, {**needed, **media}, rows[0])
        survey = _surveyed(draft, base)
    if why:
        key = "data.columns" if "data.columns" in draft.reasons else "data.path"
        draft.reasons[key] = "; ".join(filter(None, [draft.reasons.get(key), why]))
    return survey


def _surveyed(draft: FirstFile, base: Path) -> Survey:
    from holdfast.cli.commands.data.survey import survey_of

    return survey_of(from_mapping({"steps": 1, **draft.tree}, ROOTS[draft.verb], "the suggestion"), base, _LOOKED_AT)


def _why_no_turns(draft: FirstFile, base: Path, asks: str, rows: Sequence[Row]) -> str:
    """Return why prompts are not written as a user's turns; "" if they can be."""
    from holdfast.models.files.origin import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(**draft.tree["model"]), base)
    if not tokenizer.chat_template:
        return "the tokenizer has no chat template"
    marks = [mark for mark in tokenizer.all_special_tokens if any(mark in str(row.get(asks)) for row in rows)]
    return f"the prompts hold {marks[0]} and are written in a template already" if marks else ""


def _as_turns(
    draft: FirstFile, base: Path, asks: str, rows: Sequence[Row], columns: Mapping[str, str]
) -> tuple[Survey | None, str]:
    """Write prompts as a user's turns; return the survey, None where the template cannot be used, and the reason."""
    others = {ours: theirs for ours, theirs in columns.items() if ours != "prompt"}
    if others.keys() - {"images"} == {"completion"}:
        others = {"output" if ours == "completion" else ours: theirs for ours, theirs in others.items()}
    _put_columns(draft, {"instruction": asks, **others}, rows[0])
    try:
        survey = _surveyed(draft, base)
    except DataError as error:  # a template that cannot be taken apart into turns
        return None, f"the tokenizer's chat template cannot be used ({str(error).partition('. ')[0]})"
    why = f"the tokenizer has a chat template, so a {asks} is a user's turn"
    if survey.counts.get("no_end_of_turn"):
        why += "; it does not close answers, so a model does not learn to stop: see data.chat_template"
    return survey, why


def _put_columns(draft: FirstFile, columns: Mapping[str, str], row: Row) -> None:
    draft.tree["data"].pop("columns", None)
    draft.reasons.pop("data.columns", None)
    if renamed := {ours: theirs for ours, theirs in columns.items() if theirs != ours}:
        draft.put("data.columns", renamed, f"the rows have {', '.join(row)}")


def _choose_images(draft: FirstFile, base: Path, rows: Sequence[Row], asks: str | None) -> dict[str, str]:
    """Name the folder of images, and write a placeholder where texts have none; return what their column is called."""
    from holdfast.data.content.images import PLACEHOLDERS

    for column in _image_columns(rows[0])[:1]:
        images = [_images(row.get(column)) for row in rows]
        paths = [image for of_row in images for image in of_row if isinstance(image, str)]
        folder = Path(draft.tree["data"]["path"]).parent
        if paths and not (base / paths[0]).is_file() and (base / folder / paths[0]).is_file():
            draft.put("data.image_dir", str(folder), "the files of images lie beside the rows")
        mark = PLACEHOLDERS["image"]
        unmarked = asks is not None and all(mark not in str(row.get(asks)) for row in rows)
        if unmarked and all(len(of_row) == 1 for of_row in images):
            reason = f"no {asks} says by {mark} where its image goes: before it"
            draft.put("data.format", f"{mark}{{{{ content }}}}", reason)
        return {} if column in {"images", "image"} else {"images": column}
    return {}


def _image_columns(row: Row) -> list[str]:
    """Return the columns that hold images by name and by value, ours first."""
    names = [name for name in row if _IMAGES.fullmatch(name.lower()) and _images(row[name])]
    return sorted(names, key=lambda name: name not in {"images", "image"})


def _images(value: Any) -> list[Any]:
    """Return what a column holds of images; nothing if it holds something else."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    return values if values and all(_is_image(item) for item in values) else []


def _is_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("bytes") or value.get("path"))
    if isinstance(value, str):
        return PurePath(value).suffix.lower() in _IMAGE_FILES
    return isinstance(value, bytes) or hasattr(value, "getexif")


def _choose_method(draft: FirstFile, base: Path, teacher: str | None) -> int | None:
    """Choose what is trained and at which rate; return the positions that the model has.

    Raises:
        ModelError: A model is not there, or nothing that can be trained.
    """
    weights, positions = _size_of(draft.tree["model"]["path"], base)
    of_teacher = 0 if teacher is None else _size_of(teacher, base)[0]
    memory, holder = _memory_bytes()
    size = f"{weights / 1e9:.1f}B" if weights >= _LARGE else f"{weights / 1e6:.2f}M"
    needed = weights * _BYTES_PER_WEIGHT + of_teacher * _BYTES_PER_FROZEN_WEIGHT
    kind, of = "large" if weights >= _LARGE else "small", f"{size} weights"
    if needed > 0.7 * memory:
        kind = of = "adapters"
        owners = f"{size} weights with AdamW{' and the teacher' if of_teacher else ''}"
        reason = f"{owners} take {needed / 2**30:.0f} GiB, and {holder} {memory / 2**30:.0f} GiB"
        draft.put("model.lora", {"rank": 16}, f"adapters: {reason}")
    draft.put("optim.lr", _RATES[draft.verb][kind], f"a usual rate for {of}; the first key to vary")
    return positions


def _size_of(model: str, base: Path) -> tuple[int, int | None]:
    """Return how many weights and positions a model has, from its configuration alone."""
    from holdfast.models.files.configuration import maker, on_meta
    from holdfast.models.setup.model import configured

    config, _ = configured(ModelConfig(path=model), base)
    skeleton = on_meta(maker(config, trust_remote_code=False, scorer=False), config)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return sum(parameter.numel() for parameter in skeleton.parameters()), positions


def _memory_bytes() -> tuple[int, str]:
    """Return the memory of all devices, and what it is of."""
    import psutil
    import torch

    if not torch.cuda.is_available():
        return psutil.virtual_memory().total, "this machine has"
    devices = range(torch.cuda.device_count())
    total = sum(torch.cuda.get_device_properties(device).total_memory for device in devices)
    return total, f"the {len(devices)} GPUs here have"


def _choose_length(draft: FirstFile, survey: Survey, positions: int | None, rows: int) -> None:
    """Choose lengths by the first rows, tokenised as the run will do it."""
    room = 0
    if "rollout" in draft.tree:  # the model writes the answers itself
        room = _ROOM if positions is None else min(_ROOM, positions // 2)
        draft.put("rollout.max_new_tokens", room, "longest completion")
        draft.put("data.overlong", "drop", "a prompt that leaves no room is left out")
    fits = survey.length_for(0.99)
    row_count = f"{rows} rows" if rows < _LOOKED_AT else f"the first {rows} rows"
    reason = f"99 % of {row_count} fit in {fits} tokens, the longest has {survey.longest}"
    reason += f"; {room} more are written" if room else ""
    length = fits + room if positions is None else min(fits + room, positions)
    reason += f"; the model has positions for {positions}" if length < fits + room else ""
    draft.put("data.max_length", length, reason)
    if length > _MICRO_BATCH:
        draft.put("data.tokens_per_micro_batch", length, "one forward pass takes the longest row")


def _choose_steps(draft: FirstFile, rows: int) -> None:
    """Choose how many rows an update takes, and how many updates there are."""
    largest = 8 if draft.verb == "grpo" else 32
    draft.put("data.batch_size", max(1, min(largest, rows // 4)), "rows of one update, over all ranks")
    if draft.verb == "grpo":
        draft.put("steps", 200, "updates; the reward should rise within the first fifty")
        return
    if rows >= _MANY:
        draft.put("data.validation_split", 0.05, "one row in twenty is measured and not trained on")
        draft.put("evaluation.every_steps", 100, "and at the end")
    draft.put("epochs", 1 if rows >= _LOOKED_AT else 3, "passes over the rows")
