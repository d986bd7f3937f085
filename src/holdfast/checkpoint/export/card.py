"""The model card of an export: what a stranger must know before loading it, from facts of the run alone.

It may be published, so of text only what names something is in it (`config.public`): paths are last names,
addresses hosts. A card that a user wrote or changed is never replaced: see `laid_cards`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from holdfast.checkpoint.export.about import ABOUT_FILE, Exported
from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.config.base import leaves
from holdfast.config.public import public_configuration, public_text
from holdfast.files import read_text
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened

CARD, OWN_CARD, SOURCE_CARD = "README.md", "README.holdfast.md", "README.base.md"
"""The card; where it goes if a user's own stands in its place; and the card of the model that training began with."""
_SEAL = "<!-- written by holdfast, {} -->"
_SEALED = re.compile(re.escape(_SEAL).replace(r"\{\}", "([0-9a-f]{32})") + r"\n\Z")
_SETTINGS = (
    "steps", "epochs", "objective", "advantage", "kl", "reward", "optim.kind", "optim.lr", "optim.schedule.kind",
    "optim.weight_decay", "optim.clip_norm", "data.batch_size", "data.max_length", "data.train_on",
    "rollout.group_size", "rollout.max_new_tokens", "rollout.temperature", "model.lora", "teacher", "seed",
)  # fmt: skip
_METHODS = {
    "sft": "supervised fine-tuning",
    "dpo": "training on preferences between answers",
    "reward": "training of a reward model on preferences",
    "grpo": "reinforcement learning from rewards of sampled completions",
    "distill": "distillation of a teacher",
}
_ROWS = "rows of source "
_LONGEST = 200
_TEMPLATE = r"""---
{{ card_data }}
---
{%- macro table(heads, rows) %}
| {{ heads | join(" | ") }} |
|{{ " --- |" * heads | length }}
{%- for row in rows %}
| {{ row | map("replace", "|", "\\|") | join(" | ") }} |
{%- endfor %}
{%- endmacro %}

# {{ title }}

{{ origin }}

## Base

{{ base }}. Its own card, where it had one, is in `{{ source_card }}`.

## Data
{{ table(["source", "fingerprint of its rows"], rows) }}

## Method
{{ table(["key", "value"], settings) }}

## Evaluation

{% if not evaluations -%}
The run made no evaluation at this step.
{%- else -%}
{% if best_by %}The best by `{{ best_by }}` so far. {% endif -%}
Measured by the run itself, last before this export.
{{ table(["set", "metric", "value"], evaluations) }}
{%- endif %}
{%- if proof %}

## Proof

This export is compared with the same weights read by plain transformers in float32: {{ proof }}.
{{ table(["", ""], proof_numbers) }}
{%- endif %}

## Run
{{ table(["", ""], run) }}

## Files
{{ table(["file", "bytes", "xxh3_128"], files) }}

## How to load
{% if library_name == "gguf" %}
```bash
llama-cli -m {{ weights_file }}
```
{%- elif library_name == "vllm" %}
```bash
vllm serve .  # this directory, or its name on the hub
```
{%- else %}
```python
from {{ library_name }} import {{ loader }}
{%- if library_name != "peft" %}
from transformers import AutoTokenizer
{%- endif %}

path = "."  # this directory, or its name on the hub
model = {{ loader }}.from_pretrained(path{{ trust }})
{%- if library_name != "peft" %}
tokenizer = AutoTokenizer.from_pretrained(path{{ trust }})
{%- endif %}
```
{%- endif %}
{% if library_name == "peft" %}
The tokenizer is that of the base.
{% endif %}
"""


@dataclass(frozen=True)
class Card:
    """A model card that does not name its files yet."""

    metadata: Mapping[str, Any]
    """Front matter that hubs read; arguments of `ModelCardData`."""
    facts: Mapping[str, Any]
    """Values of the template."""

    def text(self, files: Mapping[str, Mapping[str, Any]], *, adapter: bool) -> str:
        """Return the card with the files beside it, how to load them, and a seal.

        Args:
            files: Size and xxh3_128 by name.
            adapter: Whether these are adapters alone.
        """
        kind = "SequenceClassification" if self.metadata["pipeline_tag"] == "text-classification" else "CausalLM"
        card = ModelCard.from_template(
            ModelCardData(**{"library_name": "peft" if adapter else "transformers", **self.metadata}),
            template_str=_TEMPLATE,
            loader=f"{'AutoPeft' if adapter else 'Auto'}ModelFor{kind}",
            trust=", trust_remote_code=True" if any(name.endswith(".py") for name in files) else "",
            weights_file=next(iter(files), ""),
            files=[(f"`{name}`", f"{file['size']:,}", f"`{file['xxh3_128']}`") for name, file in files.items()],
            **self.facts,
        )
        body = f"{str(card).rstrip()}\n\n"
        return body + _SEAL.format(hash_bytes(body.encode())) + "\n"


@dataclass(frozen=True)
class Papers:
    """The small files of an export that say what it is."""

    about: Exported | None = None
    card: Card | None = None
    """Laid beside `about` only."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Others, by file name."""

    def laid(
        self, folder: Path, hashes: Mapping[str, str], target: Path, source: Path | None, *, adapter: bool
    ) -> dict[str, str]:
        """Return the files by name, with size and hash of each file of weights and code.

        Args:
            folder: Where the files of weights and code lie.
            hashes: Of these files.
            target, source: As in `laid_cards`.
            adapter: Whether these are adapters alone.
        """
        if self.about is None:
            return dict(self.texts)
        about = self.about.with_files(folder, hashes)
        cards = {} if self.card is None else laid_cards(self.card.text(about.files, adapter=adapter), target, source)
        return {**self.texts, ABOUT_FILE: about.text(), **cards}


def card_of(
    config: Mapping[str, Any],
    verb: str,
    exported: Exported,
    numbers: Mapping[str, float],
    fingerprints: Mapping[str, str],
) -> Card:
    """Return the card of an export.

    Args:
        config: The run's whole tree.
        verb: That trained.
        exported: The run and step.
        numbers: Of the run at that step; those of evaluations are in the card.
        fingerprints: Of the rows that were trained on, as checkpoints have them.
    """
    path = _part(config, "model", "path")
    on_hub = isinstance(path, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(".")
    mean = " as the mean of steps " + ", ".join(map(str, exported.steps)) if exported.steps else ""
    averages = ", the averages of the weights that the run kept" if exported.weights == "averages" else ""
    return Card(
        {
            "base_model": path if on_hub else None,
            "pipeline_tag": "text-classification" if verb == "reward" else "text-generation",
            "tags": ["holdfast", verb],
        },
        {
            "title": public_text(exported.run) or "model",
            "origin": f"{_METHODS.get(verb, verb).capitalize()}, exported by Holdfast at step {exported.step:,}{mean}"
            f"{averages}.",
            "base": _base(config, exported),
            "source_card": SOURCE_CARD,
            "rows": list(_data(config, fingerprints)),
            "settings": list(_settings(dict(leaves(public_configuration(config))))),
            "evaluations": list(_evaluations(numbers)),
            "best_by": escaped(str(exported.rating["metric"])) if exported.rating else None,
            "run": [
                ("run", f"`{exported.run_id or 'without a directory'}`"),
                ("step", str(exported.step)),
                ("weights", exported.weights),
            ],
        },
    )


def is_own(text: str) -> bool:
    """Return whether a card is as Holdfast wrote it, every character."""
    match = _SEALED.search(text)
    return match is not None and match[1] == hash_bytes(text[: match.start()].encode())


def laid_cards(text: str, target: Path, source: Path | None) -> dict[str, str]:
    """Return the cards of an export by file name, cards of users included.

    A card that stands in the directory which is replaced, and is not as Holdfast wrote it, stays under its name, with
    ours beside it. The card of the model that training began with lies beside as well.

    Args:
        text: Of our own card.
        target: The directory that the export will have.
        source: Where the model came from.
    """
    laid = {CARD: text}
    base = _read(source / CARD) if source is not None else None
    if base is not None and not is_own(base):
        laid[SOURCE_CARD] = base
    existing = _read(target / CARD)
    if existing is not None and not is_own(existing):
        laid |= {CARD: existing, OWN_CARD: text}
    return laid


def _read(path: Path) -> str | None:
    try:
        return read_text(path)
    except (OSError, ValueError):
        return None


def _base(config: Mapping[str, Any], exported: Exported) -> str:
    path, revision = _part(config, "model", "path"), _part(config, "model", "revision")
    of_export = (exported.parent or {}).get("export")
    sentence = f"`{public_text(path)}`" if isinstance(path, str) else "A model with random weights"
    if isinstance(revision, str):
        sentence += f", revision `{public_text(revision)}`"
    if isinstance(of_export, Mapping):
        sentence += (
            f", which is step {of_export.get('step')} of the run {public_text(str(of_export.get('run')))} "
            f"(`{public_text(str(of_export.get('run_id')))}`, weights `{public_text(str(of_export.get('weights')))}`)"
        )
    return sentence


def _data(config: Mapping[str, Any], fingerprints: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    section = config.get("data")
    data: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    listed = data.get("sources")
    sources = listed if isinstance(listed, list) and listed else [data]
    for number, source in enumerate(sources):
        values: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
        task = values.get("synthetic")
        name = (
            values.get("name")
            or values.get("path")
            or (f"generated, {task.get('task')}" if isinstance(task, Mapping) else "rows")
        )
        yield public_text(str(name)), f"`{escaped(str(fingerprints.get(f'{_ROWS}{number}', 'not noted')))}`"


def _settings(public: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in public.items():
        if value is not None and any(key == name or key.startswith(f"{name}.") for name in _SETTINGS):
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
            yield f"`{key}`", escaped(shortened(text, _LONGEST))


def _evaluations(numbers: Mapping[str, float]) -> Iterator[tuple[str, ...]]:
    for name, value in numbers.items():
        if name.startswith("eval/") and math.isfinite(value):
            of_set, _, metric = name.removeprefix("eval/").partition("/")
            yield escaped(of_set), escaped(metric), f"{value:.6g}"


def _part(config: Mapping[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, Mapping) else None
