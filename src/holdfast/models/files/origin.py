"""Find a model's files, downloading a hub name into the hub's own cache, and read its configuration and tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import xxhash

from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ModelError
from holdfast.files import REGULAR, file_kind, open_regular, read_json
from holdfast.models.files.configuration import refusals
from holdfast.models.files.places import local_directory

_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
TOKENIZER_PROBE = "Sort 3187= into 1378, please!\n\tÜber naïve 你好 (x + 1) <b>bold</b>"
"""A text with words, digits, punctuation, spaces and other scripts; tokenizers that agree on it count as equal."""

_ENDINGS = {".json", ".jinja", ".model", ".safetensors", ".txt"}
"""Suffixes of names that are opened as files."""
_TEXTS = ["*.json", "*.jinja", "*.model", "*.txt", "tokenizer*", "vocab*", "merges*", "additional_chat_templates/*"]


_EDGE = 2**20
"""Bytes at either end of a weights file that a rank hashes to tell whether its files are those of another rank."""

_READ: dict[tuple[tuple[str, int, int, int], ...], str] = {}
"""Cache of fingerprints by path, size, modification time and inode of the files."""


def files_fingerprint(directory: Path) -> str:
    """Return a fingerprint of the weights in a directory, "EDGES-WHOLE".

    EDGES hashes the sizes and ends of the files, WHOLE hashes every byte. Unchanged files are not read again.
    """
    files = sorted(directory.glob("*.safetensors"))
    state = _state_of(files)
    if state not in _READ:
        lines = "\n".join(f"{file.stat().st_size} {_whole_hash(file)}" for file in files)
        _READ[state] = f"{_edges_fingerprint(files)}-{_hash(lines.encode())}"
    return _READ[state]


def remember_fingerprint(directory: Path, mark: str) -> None:
    """Cache another rank's fingerprint of the same files, unless their ends show that they are different files."""
    files = sorted(directory.glob("*.safetensors"))
    if mark.startswith(f"{_edges_fingerprint(files)}-"):
        _READ[_state_of(files)] = mark


def _state_of(files: list[Path]) -> tuple[tuple[str, int, int, int], ...]:
    statuses = [(file, file.stat()) for file in files]
    return tuple((str(file), facts.st_size, facts.st_mtime_ns, facts.st_ino) for file, facts in statuses)


def _edges_fingerprint(files: list[Path]) -> str:
    return _hash("\n".join(f"{file.stat().st_size} {_edges_hash(file)}" for file in files).encode())


def _edges_hash(file: Path) -> str:
    with open_regular(file) as opened:
        first = opened.read(_EDGE)
        opened.seek(max(0, file.stat().st_size - _EDGE))
        return _hash(first + opened.read(_EDGE))


def _whole_hash(file: Path) -> str:
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()


def _hash(data: bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(data))


def locate(name: str, config: ModelConfig, base: Path, *, weights: bool) -> Path:
    """Return the local directory of a model or tokenizer, downloading it if it is a hub name.

    Args:
        name: A directory (looked up from the current directory, then beside the YAML) or a hub name.
        config: Says which hub, revision, and whether code may come along.
        base: The directory of the YAML.
        weights: Download weights too, not only texts.

    Raises:
        ModelError: There is neither such a directory nor such a name on the hub.
    """
    lora = config.lora
    is_adapter = lora is not None and name == lora.path
    key = "model.lora.path" if is_adapter else "model.path" if weights else "model.tokenizer"
    directory = local_directory(name, base, key)
    if directory is not None:
        refuse_others_than_files(directory)
        return directory.resolve()
    patterns = _TEXTS + (_WEIGHTS if weights else []) + (["*.py"] if config.trust_remote_code else [])
    revision = config.revision if name == config.path else None  # other repositories have revisions of their own
    if config.hub == "modelscope":
        return _from_modelscope(name, revision, patterns)
    return _from_hugging_face(name, revision, patterns)


def refuse_others_than_files(directory: Path) -> None:
    """Look at what stands in a model directory before a library opens it: it would wait for a pipe for ever.

    Raises:
        ModelError: A pipe, a socket or a device stands there, or a directory under the name of a file.
    """
    for entry in sorted(directory.iterdir()):
        try:
            kind = file_kind(entry)
        except OSError as error:
            raise ModelError(f"{entry} cannot be looked at: {error.strerror or error}.") from error
        harmless = kind in {"a directory", "a link that leads nowhere"} and entry.suffix not in _ENDINGS
        if kind != REGULAR and not harmless:
            raise ModelError(f"{entry} is {kind}, not a regular file. Remove it, or put the file back.")


def _from_hugging_face(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise ModelError(_not_given(name, "the Hugging Face hub", revision, error)) from error


def _from_modelscope(name: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise ModelError("model.hub: modelscope needs a package: pip install 'holdfast[modelscope]'.") from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # its errors share no base class, and have other ones in every release
        raise ModelError(_not_given(name, "ModelScope", revision, error)) from error


def _not_given(name: str, hub: str, revision: str | None, error: Exception) -> str:
    text = str(error).strip()
    reason = text.splitlines()[0].rstrip(".") if text else type(error).__name__
    at = f" at revision {revision}" if revision else ""
    return (
        f"{name} is no directory here, and {hub} did not give it{at}: {reason}. Check the spelling, the network and "
        "your access token."
    )


def read_config(directory: Path, *, trust_remote_code: bool) -> Any:
    """Return the transformers configuration of a model directory.

    Raises:
        ModelError: The directory has no configuration, it is damaged, or it brings code that may not run.
    """
    from transformers import AutoConfig

    path = directory / "config.json"
    if not path.exists():
        entries = ", ".join(sorted(entry.name for entry in directory.iterdir())[:8]) or "nothing"
        raise ModelError(f"{directory} has no config.json, so it is no model directory. It holds {entries}.")
    try:
        raw = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not JSON: {error}. Fetch the file again.") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object, so it describes no model.")
    if "auto_map" in raw and not trust_remote_code:
        raise ModelError(
            f"{directory} brings Python code of its own ({', '.join(sorted(raw['auto_map']))}), which would run on "
            "your machine. Read it, then set model.trust_remote_code: true, or --trust-remote-code of a command."
        )
    with refusals(f"transformers cannot read {path}"):
        return AutoConfig.from_pretrained(str(directory), trust_remote_code=trust_remote_code)


def read_end_tokens(directory: Path) -> int | list[int] | None:
    """Return the tokens that end a text as generation_config.json of a model directory names them; None if it does not.

    Nothing else in that file is for us: it says how its authors sample, and would bias what a policy learns from.

    Raises:
        ModelError: The file is damaged.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return None
    try:
        tokens: int | list[int] | None = read_json(path).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} is no JSON object: {error}.") from error
    several = tokens if isinstance(tokens, list) else [tokens]
    if tokens is not None and not all(type(token) is int for token in several):
        raise ModelError(f"{path} names {tokens!r} as eos_token_id; it is one token id or a list of them.")
    return tokens


def _as_in_its_file(tokenizer: Any, directory: Path) -> Any:
    """Return the tokenizer as tokenizer.json describes it, if transformers made something else of it.

    transformers 5 loads a directory of a Qwen2 model as its own Qwen2 tokenizer, whatever tokenizer.json says; a
    tokenizer of the user's own beside such a model then splits text otherwise.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = directory / "tokenizer.json"
    if not file.exists():
        return tokenizer
    written = Tokenizer.from_file(str(file)).encode(TOKENIZER_PROBE, add_special_tokens=False).ids
    if tokenizer(TOKENIZER_PROBE, add_special_tokens=False)["input_ids"] == written:
        return tokenizer
    print(
        f"warning: transformers' AutoTokenizer makes a {type(tokenizer).__name__} of {directory}, which splits text "
        "otherwise than its tokenizer.json; the file is used. Load that of exports with PreTrainedTokenizerFast.",
        flush=True,
    )
    return PreTrainedTokenizerFast.from_pretrained(str(directory))


def _with_template(tokenizer: Any, directory: Path) -> Any:
    """Give the tokenizer the chat template of its processor's file, where it has none of its own."""
    file = directory / "chat_template.json"
    if not tokenizer.chat_template and file.exists():
        tokenizer.chat_template = read_json(file)["chat_template"]
    return tokenizer


def _built_in(name: str) -> Any:
    from holdfast.data.tasks.synthetic import character_tokenizer, picture_tokenizer

    match name:
        case "builtin:characters":
            return character_tokenizer()
        case "builtin:pictures":
            return picture_tokenizer()
        case _:
            raise ModelError(f"There is no tokenizer {name}; there are builtin:characters and builtin:pictures.")


def load_tokenizer(config: ModelConfig, base: Path) -> Any:
    """Return the run's tokenizer.

    Raises:
        ModelError: The directory has no tokenizer that transformers can load, or no built-in tokenizer has this name.
    """
    from transformers import AutoTokenizer

    name = config.tokenizer or config.path
    assert name is not None, "the configuration demands a tokenizer"
    if name.startswith("builtin:"):
        return _built_in(name)
    directory = locate(name, config, base, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=config.trust_remote_code)
        return _with_template(_as_in_its_file(tokenizer, directory), directory)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(" .:") or type(error).__name__
        raise ModelError(
            f"{directory} has no tokenizer that transformers can load: {reason}. Set model.tokenizer to a directory "
            "that has one."
        ) from error
