"""`holdfast checkpoint export --format gguf | compressed-tensors`: write, prove, and give the directory its name.

The checkpoint is exported as a directory of transformers first, which is the reference of the proof, and is deleted
again. Everything lies beside the target until it is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.export.assets import ExportFailed
from holdfast.checkpoint.export.card import SOURCE_CARD, Papers
from holdfast.checkpoint.export.stored import export_stored, stored_papers
from holdfast.checkpoint.export.write import check_target, replace_directory, staging_beside
from holdfast.checkpoint.inspect.tensors import StoredCheckpoint
from holdfast.checkpoint.place.hashing import hash_file
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.config.load import EXPORTED_CONFIG
from holdfast.config.sections.model import ModelConfig
from holdfast.config.yaml12 import parse_file
from holdfast.errors import ConfigError, HoldfastError, UserError
from holdfast.features.served_formats.proof import Proof, answers_of, compare, until_end
from holdfast.files import NotRegular, size_words
from holdfast.models.files.origin import load_tokenizer, read_config, read_end_tokens

_EXTRAS = {"gguf": ("gguf", "gguf"), "compressed-tensors": ("compressed_tensors", "compressed")}
"""Format to the module that writes it and the extra that brings it."""
TYPES = {"gguf": ("f16", "q8_0"), "compressed-tensors": ("fp8", "int8")}
"""Format to the types of its weights, the usual one first."""


@dataclass(frozen=True)
class ServedExport:
    """What is exported, and how it is proved."""

    form: str
    """A name in `TYPES`."""
    tensor_type: str | None = None
    """Of the weights; None for the usual one."""
    rows: str | None = None
    """A file of rows for the proof; None for those of the run, and fixed prompts."""
    reader: Path | None = None
    """An interpreter with llama-cpp-python or vLLM."""
    averaged: bool = False
    base: Path | None = None

    @property
    def weights(self) -> str:
        """Return the type of the weights.

        Raises:
            ConfigError: The format has no such type.
        """
        types = TYPES[self.form]
        if self.tensor_type not in {None, *types}:
            raise ConfigError(f"--type {self.tensor_type} is none of --format {self.form}: {', '.join(types)}.")
        return self.tensor_type or types[0]


def export_served(checkpoint: StoredCheckpoint, directory: Path, how: ServedExport) -> tuple[list[str], bool]:
    """Write a directory in a format of programs that serve models, whole or not at all, and prove it.

    An export outside its limits is written all the same and says so: `holdfast push` refuses it.

    Args:
        checkpoint: Of a run; adapters are merged.
        directory: Replaced if it is an export.
        how: The format and the proof.

    Returns:
        Lines for the user, and whether the export is within its limits.

    Raises:
        UserError: The extra is missing, the format has no form for this model, no program could read what was written,
            or the disk did not take it; nothing was left.
    """
    from holdfast.features.served_formats.readers import check_reader

    module, extra = _EXTRAS[how.form]
    if find_spec(module) is None:
        raise ConfigError(f"--format {how.form} needs the package {module}: pip install 'holdfast[{extra}]'.")
    tensor_type = how.weights
    check_target(directory)
    check_reader(how.reader)
    with _refused(directory), staging_beside(directory) as plain, staging_beside(directory) as staging:
        export_stored([checkpoint], plain / "model", averaged=how.averaged, base=how.base)
        artefact = written(plain / "model", staging, how.form, tensor_type, directory.name)
        settings = parse_file(plain / "model" / EXPORTED_CONFIG).values
        proof = prove(plain / "model", artefact, how, tensor_type, settings)
        papers = stored_papers(checkpoint, averaged=how.averaged)
        if (plain / "model" / SOURCE_CARD).exists():
            shutil.copyfile(plain / "model" / SOURCE_CARD, staging / SOURCE_CARD)
        _lay(papers, staging, directory, proof.as_plain(), proof.verdict)
        for path in staging.iterdir():
            LocalStorage(staging).sync(path.name)
        replace_directory(staging, directory)
    size = size_words(sum(path.stat().st_size for path in directory.iterdir()))
    return [f"{checkpoint.path} is exported to {directory} ({how.form}, {tensor_type}, {size})", proof.verdict], (
        proof.is_within
    )


@contextmanager
def _refused(directory: Path) -> Iterator[None]:
    """Make one paragraph of whatever keeps an export from being written."""
    from safetensors import SafetensorError

    try:
        yield
    except (UserError, CheckpointError, NotRegular):
        raise
    except (HoldfastError, ExportFailed) as error:
        raise UserError(str(error)) from error
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{directory} could not be written: {error}. Nothing was left; make room, or name another place."
        ) from error


def written(plain: Path, staging: Path, form: str, tensor_type: str, name: str) -> Path:
    """Write the weights, and return what a program is asked to read."""
    config = read_config(plain, trust_remote_code=False)
    if form == "gguf":
        from holdfast.features.served_formats.gguf_file import write_gguf

        file = staging / f"{name}-{tensor_type.upper()}.gguf"
        write_gguf(plain, file, tensor_type, name, config, _tokenizer(plain))
        return file
    from holdfast.features.served_formats.compressed import write_compressed

    write_compressed(plain, staging, tensor_type, config)
    return staging


def _tokenizer(directory: Path) -> Any:
    return load_tokenizer(ModelConfig(path=str(directory)), directory)


def prove(plain: Path, artefact: Path, how: ServedExport, tensor_type: str, settings: Mapping[str, Any]) -> Proof:
    """Compare an export with the model directory that it was made of.

    Args:
        plain: The directory of transformers.
        artefact: The GGUF file, or the directory.
        how: Rows, and the program that reads.
        tensor_type: Of the weights.
        settings: The run's configuration.
    """
    from holdfast.features.served_formats.readers import plain_model, read_by_another
    from holdfast.features.served_formats.rows import proof_rows

    tokenizer = _tokenizer(plain)
    rows, origin = proof_rows(tokenizer, settings, how.rows)
    reference = answers_of(plain_model(plain), tokenizer, rows)
    program, answers = read_by_another(how.form, artefact, rows, how.reader, plain)
    named = read_end_tokens(plain)
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return compare(until_end(reference, ends), until_end(answers, ends), tensor_type, program, origin)


def _lay(papers: Papers, staging: Path, directory: Path, proof: Mapping[str, Any], verdict: str) -> None:
    """Lay the small files beside the weights: the card, the record of the export, and its configuration."""
    weights = [*staging.glob("*.gguf"), *staging.glob("*.safetensors")]
    assert papers.about is not None and papers.card is not None
    library = "gguf" if any(path.suffix == ".gguf" for path in weights) else "vllm"
    card = replace(
        papers.card,
        metadata={**papers.card.metadata, "library_name": library},
        facts={**papers.card.facts, "proof": verdict, "proof_numbers": _rows_of(proof)},
    )
    papers = replace(papers, about=replace(papers.about, proof=dict(proof)), card=card)
    hashes = {path.name: hash_file(path) for path in weights}
    for name, text in papers.laid(staging, hashes, directory, None, adapter=False).items():
        (staging / name).write_text(text, encoding="utf-8")


def _rows_of(proof: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("read by", str(proof["program"])),
        ("type", str(proof["type"])),
        ("rows", f"{proof['rows']}, {proof['tokens']} tokens"),
        ("largest difference of a log-probability", f"{proof['largest']:.4g} (limit {proof['largest_limit']:g})"),
        ("mean difference", f"{proof['mean']:.4g} (limit {proof['mean_limit']:g})"),
        ("greedy continuations that are the same", f"{proof['greedy_same']} of {proof['greedy']}"),
    ]
