"""`holdfast init`: writes a first configuration from a model's files and the first rows of the data."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from holdfast.cli.commands.init.columns import (
    LOOKED_AT,
    choose_columns,
    find_column,
    image_columns,
    named_columns,
    needed_columns,
)
from holdfast.cli.commands.init.draft import FirstFile
from holdfast.config.sections.data import SourceConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.roots import ROOTS
from holdfast.errors import ConfigError, DataError
from holdfast.text.numbers import number_as_text

if TYPE_CHECKING:
    from holdfast.data.rows.rows import Row
    from holdfast.data.survey import Survey

_MANY = 200
"""Rows from which on some are held out."""
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

_GOLD = ("answer", "ground_truth", "solution", "gold", "target", "output", "completion", "response")
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

    rows = list(islice(open_source(SourceConfig(path=data), base).scan(0), LOOKED_AT))
    if not rows:
        raise DataError(f"{data} has no rows, so nothing can be learned from them about a run.")
    columns = named_columns(rows[0])
    if verb is None:
        has_pairs = {"chosen", "rejected"} <= columns.keys() or {"label", "completion"} <= columns.keys()
        verb = DistillConfig.verb if teacher is not None else "dpo" if has_pairs else "sft"
    taught = {} if teacher is None else {"teacher": {"path": teacher}}
    draft = FirstFile(verb, {"run": {"name": name}, "model": {"path": model}, **taught, "data": {"path": data}})
    needed = needed_columns(verb, columns, list(rows[0]))
    _choose_objective(draft, needed, rows)
    survey = choose_columns(draft, base, rows, needed)
    positions = _choose_method(draft, base, teacher)
    _choose_length(draft, survey, positions, len(rows))
    _choose_steps(draft, len(rows))
    return draft


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
        gold = find_column(rows[0], _GOLD, [*needed.values(), *image_columns(rows[0])])
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
    _choose_dtype(draft)
    return positions


def _choose_dtype(draft: FirstFile) -> None:
    """Choose bfloat16 where a processor that trains multiplies it."""
    import torch

    from holdfast.processor import WORTH_IT, bfloat16_gain, bfloat16_unit

    if not torch.cuda.is_available() and (unit := bfloat16_unit()) and bfloat16_gain() >= WORTH_IT:
        draft.put("parallel.compute_dtype", "bfloat16", f"this processor multiplies it ({unit}), faster than float32")


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
    row_count = f"{rows} rows" if rows < LOOKED_AT else f"the first {rows} rows"
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
    draft.put("epochs", 1 if rows >= LOOKED_AT else 3, "passes over the rows")
