"""The model card of an export: what a stranger must know before loading it, from facts of the run alone.

It may be published, so of text only what names something is in it (`config.public`): paths are last names,
addresses hosts. A card that a user wrote or changed is never replaced: see `laid_cards`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.export.about import ABOUT_FILE, Exported
from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.config.base import leaves
from holdfast.config.public import public_configuration, public_text
from holdfast.config.yaml12 import to_yaml
from holdfast.files import read_text
from holdfast.text.escaping import escaped

CARD, OWN_CARD, SOURCE_CARD = "README.md", "README.holdfast.md", "README.base.md"
"""The card; where it goes if a user's own stands in its place; and the card of the model that training began with."""
_SEAL = "<!-- written by holdfast, {} -->"
_SEALED = re.compile(re.escape(_SEAL).replace(r"\{\}", "([0-9a-f]{32})") + r"\n\Z")
_SETTINGS = (
    "steps", "epochs", "objective", "advantage", "kl", "reward", "optim.kind", "optim.lr", "optim.schedule.kind",
    "optim.weight_decay", "optim.clip_norm", "data.batch_size", "data.max_length", "data.train_on",
    "rollout.group_size", "rollout.max_new_tokens", "rollout.temperature", "model.lora", "teacher.path", "seed",
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


def card_of(
    config: Mapping[str, Any],
    verb: str,
    exported: Exported,
    numbers: Mapping[str, float],
    fingerprints: Mapping[str, str],
) -> str:
    """Return the card of an export, without its files, which `with_files` adds.

    Args:
        config: The run's whole tree.
        verb: That trained.
        exported: The run and step.
        numbers: Of the run at that step; those of evaluations are in the card.
        fingerprints: Of the rows that were trained on, as checkpoints have them.
    """
    public = dict(leaves(public_configuration(config)))
    sections = [
        _head(config, verb),
        f"# {public_text(exported.run) or 'model'}",
        f"{_METHODS.get(verb, verb).capitalize()}, exported by Holdfast at step "
        f"{exported.step:,}"
        + (" as the mean of steps " + ", ".join(map(str, exported.steps)) if exported.steps else "")
        + (", the averages of the weights that the run kept." if exported.weights == "averages" else "."),
        "## Base\n\n" + _base(config, exported),
        "## Data\n\n" + _data(config, fingerprints),
        "## Method\n\n" + _table(("key", "value"), _settings(public)),
        "## Evaluation\n\n" + _evaluation(numbers, exported),
        "## Run\n\n" + _table(("", ""), _run(exported)),
    ]
    return "\n\n".join(sections) + "\n"


def with_card(texts: Mapping[str, str], *, adapter: bool = False) -> dict[str, str]:
    """Return the small files of an export, its card with the weights files that the one about itself names."""
    if CARD not in texts or ABOUT_FILE not in texts:
        return dict(texts)
    files = json.loads(texts[ABOUT_FILE])["files"]
    return {**texts, CARD: with_files(texts[CARD], files, adapter=adapter)}


def with_files(text: str, files: Mapping[str, Mapping[str, Any]], *, adapter: bool) -> str:
    """Return a card with how to load what lies beside it, its weights files and hashes, and a seal.

    Args:
        text: From `card_of`.
        files: Size and xxh3_128 by name.
        adapter: Whether these are adapters alone.
    """
    rows = [(f"`{name}`", f"{value['size']:,}", f"`{value['xxh3_128']}`") for name, value in files.items()]
    if adapter:
        text = text.replace("library_name: transformers", "library_name: peft", 1)
    listed = _table(("file", "bytes", "xxh3_128"), rows)
    body = f"{text}\n## Files\n\n{listed}\n\n## How to load\n\n{_loading(text, files, adapter=adapter)}\n"
    return body + _SEAL.format(hash_bytes(body.encode())) + "\n"


def is_own(text: str) -> bool:
    """Return whether a card is as Holdfast wrote it, every character."""
    match = _SEALED.search(text)
    return match is not None and match[1] == hash_bytes(text[: match.start()].encode())


def laid_cards(texts: Mapping[str, str], target: Path, source: Path | None) -> dict[str, str]:
    """Return the small files of an export, cards of users included.

    A card that stands in the directory which is replaced, and is not as Holdfast wrote it, stays under its name, with
    ours beside it. The card of the model that training began with lies beside as well.

    Args:
        texts: By file name.
        target: The directory that the export will have.
        source: Where the model came from.
    """
    if CARD not in texts:
        return dict(texts)
    laid = dict(texts)
    base = _read(source / CARD) if source is not None else None
    if base is not None and not is_own(base):
        laid[SOURCE_CARD] = base
    existing = _read(target / CARD)
    if existing is not None and not is_own(existing):
        laid[CARD], laid[OWN_CARD] = existing, texts[CARD]
    return laid


def _read(path: Path) -> str | None:
    try:
        return read_text(path)
    except (OSError, ValueError):
        return None


def _head(config: Mapping[str, Any], verb: str) -> str:
    """Return the front matter that hubs read."""
    path = _part(config, "model", "path")
    values: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification" if verb == "reward" else "text-generation",
        "tags": ["holdfast", verb],
    }
    if isinstance(path, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith("."):
        values["base_model"] = path
    return f"---\n{to_yaml(values).strip()}\n---"


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
    return f"{sentence}. Its own card, where it had one, is in `{SOURCE_CARD}`."


def _data(config: Mapping[str, Any], fingerprints: Mapping[str, str]) -> str:
    section = config.get("data")
    data: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    listed = data.get("sources")
    sources = listed if isinstance(listed, list) and listed else [data]
    rows = []
    for number, source in enumerate(sources):
        values: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
        task = values.get("synthetic")
        name = (
            values.get("name")
            or values.get("path")
            or (f"generated, {task.get('task')}" if isinstance(task, Mapping) else "rows")
        )
        rows.append((public_text(str(name)), f"`{escaped(str(fingerprints.get(f'{_ROWS}{number}', 'not noted')))}`"))
    return _table(("source", "fingerprint of its rows"), rows)


def _settings(public: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in public.items():
        if value is not None and any(key == name or key.startswith(f"{name}.") for name in _SETTINGS):
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
            yield f"`{key}`", escaped(text if len(text) <= _LONGEST else text[:_LONGEST] + "…")


def _evaluation(numbers: Mapping[str, float], exported: Exported) -> str:
    rows = []
    for name, value in numbers.items():
        if name.startswith("eval/") and math.isfinite(value):
            of_set, _, metric = name.removeprefix("eval/").partition("/")
            rows.append((escaped(of_set), escaped(metric), f"{value:.6g}"))
    if not rows:
        return "The run made no evaluation at this step."
    best = exported.rating
    introduction = f"The best by `{escaped(str(best['metric']))}` so far. " if best else ""
    table = _table(("set", "metric", "value"), rows)
    return f"{introduction}Measured by the run itself, last before this export.\n\n{table}"


def _run(exported: Exported) -> Iterator[tuple[str, str]]:
    yield "run", f"`{exported.run_id or 'without a directory'}`"
    yield "step", str(exported.step)
    yield "weights", exported.weights


def _loading(text: str, files: Iterable[str], *, adapter: bool) -> str:
    scores = "pipeline_tag: text-classification" in text
    kind = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    if adapter:
        kind = kind.replace("Auto", "AutoPeft")
    code = ", trust_remote_code=True" if any(name.endswith(".py") for name in files) else ""
    package = "peft" if adapter else "transformers"
    lines = [
        f"from {package} import {kind}",
        "from transformers import AutoTokenizer",
        "",
        'path = "."  # this directory, or its name on the hub',
        f"model = {kind}.from_pretrained(path{code})",
    ]
    if adapter:
        return "```python\n" + "\n".join([lines[0], "", *lines[3:]]) + "\n```\n\nThe tokenizer is that of the base.\n"
    return "```python\n" + "\n".join([*lines, f"tokenizer = AutoTokenizer.from_pretrained(path{code})"]) + "\n```\n"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def _part(config: Mapping[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, Mapping) else None
