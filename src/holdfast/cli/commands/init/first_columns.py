"""Guesses for `holdfast init` the purpose of each column, and whether its texts are conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.config.load import from_mapping
from holdfast.config.sections.model import ModelConfig
from holdfast.config.verbs.roots import ROOTS
from holdfast.errors import DataError

if TYPE_CHECKING:
    from holdfast.data.rows.rows import Row
    from holdfast.data.survey import Survey

LOOKED_AT = 500
"""Rows that columns and lengths are taken from."""

_CALLED = {
    "prompt": ("prompt", "question", "problem", "instruction", "query", "input"),
    "completion": ("completion", "response", "answer", "output", "solution", "target"),
    "chosen": ("chosen", "preferred", "accepted", "good", "better", "winner"),
    "rejected": ("rejected", "dispreferred", "bad", "worse", "loser"),
    "label": ("label",),
    "messages": ("messages", "conversation", "dialogue"),
    "text": ("text", "content"),
    "gold": ("answer", "ground_truth", "solution", "gold", "target", "output", "completion", "response"),
}
"""Our columns, and what files call them; the first name that is there counts."""


@dataclass
class FirstFile:
    """A configuration that `holdfast init` is composing."""

    tree: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    """By dotted key: why it has its value."""

    def put(self, key: str, value: Any, reason: str) -> None:
        """Set a key, and say why."""
        *sections, name = key.split(".")
        mapping = self.tree
        for section in sections:
            mapping = mapping.setdefault(section, {})
        mapping[name] = value
        self.reasons[key] = reason

    def lines(self) -> Iterator[str]:
        """Yield what was decided and why."""
        for key, reason in self.reasons.items():
            value: Any = self.tree
            for name in key.split("."):
                value = value[name]
            yield f"{key} = {value}: {reason}"


def verb_for(columns: Sequence[str]) -> str:
    """Return what rows with these columns are for."""
    recognised = {ours for ours in _CALLED if column_of(columns, ours)}
    return "dpo" if {"chosen", "rejected"} <= recognised or {"label", "completion"} <= recognised else "sft"


def choose_columns(draft: FirstFile, verb: str, columns: Sequence[str]) -> None:
    """Say which columns of the file are ours, where they are called otherwise.

    Raises:
        DataError: Columns that the verb needs are not there.
    """
    names = _needed(verb, columns)
    columns_of_file = {ours: column_of(columns, ours) for ours in names}
    missing = [ours for ours, theirs in columns_of_file.items() if theirs is None]
    if missing:
        raise DataError(
            f"Rows for `holdfast {verb}` need {' and '.join(names)}; there are the columns {', '.join(columns)}. "
            f"{_advice(columns_of_file, columns)}"
        )
    renamed = _renamed(columns_of_file)
    if verb == "dpo":
        labelled = "label" in names
        reason = "rows have one answer and a label each, not pairs" if labelled else "rows have two answers each"
        draft.put("preference.loss", "kto" if labelled else "dpo", reason)
    if verb == "distill" and names == ["prompt"]:
        draft.put("rollout.share", 1.0, "rows have no answers, so the student writes them and the teacher judges")
    if verb == "reward":
        draft.put("preference.loss", "bradley_terry", "the answer that is preferred is to score higher")
    if renamed:
        draft.put("data.columns", renamed, f"the rows have {', '.join(columns)}")


def _advice(columns_of_file: Mapping[str, str | None], columns: Sequence[str]) -> str:
    """Say how to name the columns that are not recognised: those that are left, in their order."""
    unused = [column for column in columns if column not in columns_of_file.values()]
    missing = [ours for ours, theirs in columns_of_file.items() if theirs is None]
    if len(unused) < len(missing):
        return f"There is no column for {' and '.join(missing[len(unused) :])}: add it to the rows."
    renamed = _renamed({**columns_of_file, **dict(zip(missing, unused, strict=False))})
    text = ", ".join(f"{ours}: {theirs}" for ours, theirs in renamed.items())
    return f"Write a file by hand and name them, as in data.columns={{{text}}}, or rename them in the rows."


def prompt_column(verb: str, rows: Sequence[Row]) -> str | None:
    """Return the column of the prompts that a verb reads; None if they are no texts."""
    columns = list(rows[0])
    asks = column_of(columns, "prompt") if "prompt" in _needed(verb, columns) else None
    return asks if asks is not None and isinstance(rows[0].get(asks), str) else None


def choose_turns(draft: FirstFile, verb: str, base: Path, rows: Sequence[Row]) -> None:
    """Make prompts that are texts a user's turns where the tokenizer has a chat template that can write them.

    Joined as they stand, a question and its answer would have nothing between them.
    """
    from holdfast.models.files.origin import load_tokenizer

    asks = prompt_column(verb, rows)
    if asks is None:
        return
    columns = list(rows[0])
    called = {ours: column_of(columns, ours) for ours in _needed(verb, columns) if ours != "prompt"}
    tokenizer = load_tokenizer(ModelConfig(**draft.tree["model"]), base)
    plain = _why_plain(tokenizer, [str(row.get(asks)) for row in rows])
    media = {ours: name for ours, name in draft.tree["data"].get("columns", {}).items() if ours == "images"}
    renamed = _renamed({"instruction": asks, **_answers(called)}) | media
    data = {key: value for key, value in draft.tree["data"].items() if key != "columns"}
    counts: Mapping[str, int] = {}
    if not plain:
        try:
            survey, _ = survey_of_draft(
                {**draft.tree, "data": data | ({"columns": renamed} if renamed else {})}, verb, base
            )
            counts = survey.counts
        except DataError as error:  # a template that cannot be taken apart into turns
            plain = f"the tokenizer's chat template cannot be used ({str(error).partition('. ')[0]})"
    if plain:
        alone = "prompts go to the model" if verb == "grpo" else "prompt and answer are joined"
        _explain_columns(draft, f"{plain}, so {alone} as they stand")
        return
    draft.tree["data"] = data
    draft.reasons.pop("data.columns", None)
    if renamed:
        draft.put("data.columns", renamed, f"the rows have {', '.join(columns)}")
    _explain_columns(draft, f"the tokenizer has a chat template, so a {asks} is a user's turn{_closing(counts)}")


def _answers(called: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return what answers are called beside an instruction: one alone is its output."""
    return {"output": called["completion"]} if set(called) == {"completion"} else dict(called)


def _explain_columns(draft: FirstFile, why: str) -> None:
    """Say how columns become texts, at the key that names them."""
    key = "data.columns" if "data.columns" in draft.reasons else "data.path"
    draft.reasons[key] = "; ".join(filter(None, [draft.reasons.get(key), why]))


def _closing(counts: Mapping[str, int]) -> str:
    if not counts.get("no_end_of_turn"):
        return ""
    return "; it does not close answers, so a model does not learn to stop: see data.chat_template"


def _why_plain(tokenizer: Any, prompts: Sequence[str]) -> str:
    """Return why prompts are no turns of a conversation; "" if they are."""
    if not tokenizer.chat_template:
        return "the tokenizer has no chat template"
    marks = [token for token in tokenizer.all_special_tokens if any(token in prompt for prompt in prompts)]
    return f"the prompts hold {marks[0]} and are written in a template already" if marks else ""


def column_of(columns: Sequence[str], ours: str, without: Iterable[str] = ()) -> str | None:
    """Return what the file calls one of our columns; None if it has no such column."""
    lower = {column.lower(): column for column in columns if column not in without}
    return next((lower[name] for name in _CALLED[ours] if name in lower), None)


def _renamed(theirs: Mapping[str, str | None]) -> dict[str, str]:
    """Return the columns that the file calls otherwise."""
    return {ours: name for ours, name in theirs.items() if name is not None and name != ours}


def _needed(verb: str, columns: Sequence[str]) -> list[str]:
    """Return which of our columns a verb reads, as far as the file's columns leave a choice."""
    recognised = {ours for ours in _CALLED if column_of(columns, ours)}
    prompt = sorted(recognised & {"prompt"})
    match verb:
        case "grpo":
            return ["messages"] if "messages" in recognised and not prompt else ["prompt"]
        case "dpo" if "label" in recognised and not {"chosen", "rejected"} <= recognised:
            return ["prompt", "completion", "label"]
        case "dpo" | "reward":
            return [*prompt, "chosen", "rejected"]
    return _needed_of_answers(verb, recognised)


def _needed_of_answers(verb: str, recognised: set[str]) -> list[str]:
    """Return what is read of rows that hold answers; of a distillation's, prompts alone will do."""
    prompt = "prompt" in recognised
    if "messages" in recognised:
        return ["messages"]
    if verb == "distill" and prompt and "completion" not in recognised:
        return ["prompt"]
    return ["text"] if "text" in recognised and not prompt else ["prompt", "completion"]


def survey_of_draft(tree: Mapping[str, Any], verb: str, base: Path) -> tuple[Survey, int | None]:
    """Return what the first rows come to, and how many positions the model has."""
    from holdfast.cli.commands.data.survey import survey_of
    from holdfast.models.setup.model import configured

    values = {key: value for key, value in tree.items() if key != "verb"}
    config = from_mapping({"steps": 1, **values}, ROOTS[verb], "the suggestion")
    raw, _ = configured(config.model, base)
    longest = getattr(raw.get_text_config(), "max_position_embeddings", None)
    return survey_of(config, base, LOOKED_AT), longest
