"""A tokenizer as GGUF keeps it: tokens, their kinds, merges or scores, special tokens, the chat template.

llama.cpp reads no regular expression from a file: it has the splits of known tokenizers under names, and
`tokenizer.ggml.pre` is such a name. Which one fits is read from tokenizer.json, and a split without a name is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import ModelError
from holdfast.files import read_json
from holdfast.models.files.origin import read_end_tokens

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {rf"{_WORDS}\p{{N}}{{1,3}}{_OTHERS}": "llama-bpe", rf"{_WORDS}\p{{N}}{_OTHERS}": "qwen2"}
"""Regular expression to llama.cpp's name."""
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


@dataclass(frozen=True)
class Vocabulary:
    """The keys below `tokenizer.` of a GGUF file."""

    model: str
    """"gpt2" for merges of bytes, "llama" for SentencePiece."""
    pre: str
    """llama.cpp's name of the split before the merges."""
    tokens: list[str]
    kinds: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    """Special tokens, as `bos_token_id`."""
    switches: dict[str, bool] = field(default_factory=dict)
    """As `add_bos_token`."""
    template: str | None = None


def vocabulary_of(directory: Path, tokenizer: Any, rows: int) -> Vocabulary:
    """Return the vocabulary of a model directory.

    Args:
        directory: With tokenizer.json.
        tokenizer: Loaded from it by transformers.
        rows: Of the embeddings; rows that no token has become unused tokens.

    Raises:
        ModelError: GGUF has no form for it, or it has more tokens than the embeddings have rows.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json, from which GGUF's vocabulary is written: its tokenizer is a "
            f"{type(tokenizer).__name__}. Save it as a fast tokenizer. Nothing was written."
        )
    tree = read_json(path)
    if tree["model"]["type"] != "BPE":
        raise ModelError(
            f"{path} is a tokenizer of the kind {tree['model']['type']}, and GGUF files of these families keep BPE "
            "alone. Nothing was written."
        )
    tokens, kinds = _listed(tree, rows, path)
    numbers = _special(tokenizer, directory)
    switches = dict(zip(("add_bos_token", "add_eos_token"), _added(tokenizer), strict=True))
    template = _template(tokenizer)
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in tree["model"]["merges"]]
    if not tree["model"].get("byte_fallback"):
        pre, joined = _split_name(tree, path), [" ".join(pair) for pair in merges]
        return Vocabulary("gpt2", pre, tokens, kinds, joined, [], numbers, switches, template)
    switches["add_space_prefix"] = _adds_space(tree)
    scores = _scores(tokens, merges)
    if (unknown := tree["model"].get("unk_token")) in tree["model"]["vocab"]:
        kinds[tree["model"]["vocab"][unknown]] = _UNKNOWN
    kinds = [_BYTE if _BYTE_TOKEN.fullmatch(token) else kind for token, kind in zip(tokens, kinds, strict=True)]
    return Vocabulary("llama", "default", tokens, kinds, [], scores, numbers, switches, template)


def _listed(tree: Mapping[str, Any], rows: int, path: Path) -> tuple[list[str], list[int]]:
    """Return tokens in the order of their numbers, and the kind of each."""
    names: dict[int, tuple[str, int]] = {number: (token, _NORMAL) for token, number in tree["model"]["vocab"].items()}
    for token in tree["added_tokens"]:
        names[token["id"]] = (token["content"], _CONTROL if token["special"] else _USER)
    if names and max(names) >= rows:
        raise ModelError(
            f"{path} has a token of number {max(names)}, and the embeddings have {rows} rows: such a token has no "
            "weights. Nothing was written; train with the tokenizer of the model."
        )
    listed = [names.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(rows)]
    return [token for token, _ in listed], [kind for _, kind in listed]


def _split_name(tree: Mapping[str, Any], path: Path) -> str:
    """Return llama.cpp's name of how a text is split before bytes are merged.

    Raises:
        ModelError: It has none.
    """
    normaliser = tree.get("normalizer")
    if normaliser is not None and normaliser["type"] != "NFC":  # llama.cpp normalises nothing
        raise ModelError(
            f"{path} normalises texts by {normaliser['type']}, and llama.cpp does not. Nothing was written."
        )
    steps = list(_steps(tree.get("pre_tokenizer")))
    match steps:
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            return "gpt-2"
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False},
        ]:
            return "smollm"
        case [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ] if regex in _SPLITS:
            return _SPLITS[regex]
    shown = ", ".join(str(step.get("pattern", {}).get("Regex") or step["type"]) for step in steps) or "nothing"
    raise ModelError(
        f"{path} splits texts by {shown:.200}, and llama.cpp has no such split under a name that is known here. "
        "Nothing was written."
    )


def _steps(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for each in step["pretokenizers"]:
            yield from _steps(each)
    else:
        yield step


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Return scores by which llama.cpp merges in the order of the merges: the earlier, the larger."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _adds_space(tree: Mapping[str, Any]) -> bool:
    """Return whether a space is put before a text, by a normaliser or before the merges."""
    normaliser = tree.get("normalizer") or {}
    parts = normaliser.get("normalizers", [normaliser])
    if any(part.get("type") == "Prepend" for part in parts):
        return True
    return any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in _steps(tree.get("pre_tokenizer"))
    )


def _added(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether the tokenizer puts its first token before a text, and its last one behind."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next(index for index in range(len(whole)) if whole[index : index + len(plain)] == plain)
    return start > 0, len(whole) > start + len(plain)


def _special(tokenizer: Any, directory: Path) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    numbers = {
        f"{written}_token_id": number
        for name, written in names.items()
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None
    }
    ends = read_end_tokens(directory)
    several = ends if isinstance(ends, list) else [] if ends is None else [ends]
    others = [end for end in several if end != numbers.get("eos_token_id")]
    if others:
        numbers["eot_token_id"] = others[0]
    return numbers


def _template(tokenizer: Any) -> str | None:
    """Return the chat template; `generation` marks the assistant's words for training, and other programs lack it."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is None:
        return None
    return _GENERATION.sub(lambda mark: f"{mark[1]}{'endif' if mark[2] else 'if true'}{mark[3]}", template)
