"""Write a GGUF file from a model directory, with one tensor in memory at a time."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from holdfast.errors import ModelError
from holdfast.features.served_formats.families import Family, family_of, in_halves, in_pairs, metadata, rotary_divisors
from holdfast.features.served_formats.vocabulary import Vocabulary, vocabulary_of
from holdfast.models.files.safetensors_files import StoredTensors

TYPES = {"f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
"""Types of matrices by name; vectors stay float32."""
_FILE_TYPES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
_HEAD = "lm_head.weight"
_EMBEDDINGS = "model.embed_tokens.weight"
_BLOCK = 32
"""Numbers that share a scale in Q8_0."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Planned:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    load: Callable[[], Array]
    """Returns it as float32."""

    def stored(self) -> Array:
        """Return it as it lies in the file.

        Raises:
            ModelError: A number is too large for float16.
        """
        values = self.load()
        if self.kind == gguf.GGMLQuantizationType.F32:
            return values
        largest = np.abs(values).max(initial=0.0) / (127 if self.kind == gguf.GGMLQuantizationType.Q8_0 else 1)
        if not largest <= np.finfo(np.float16).max:
            raise ModelError(
                f"{self.name} holds {np.abs(values).max():.4g}, which float16 cannot hold, so this model cannot be "
                "written in this type. Nothing was written."
            )
        quantised: Array = gguf.quants.quantize(values, self.kind)
        return quantised


def write_gguf(directory: Path, file: Path, tensor_type: str, name: str, config: Any, tokenizer: Any) -> None:
    """Write a GGUF file.

    Args:
        directory: A model directory of transformers, adapters merged.
        file: New.
        tensor_type: A name in `TYPES`.
        name: Of the model, in the file.
        config, tokenizer: As transformers read them from the directory.

    Raises:
        ModelError: The architecture, a tensor or the tokenizer has no form in GGUF.
    """
    family = family_of(config)
    stored = StoredTensors(directory)
    rows = stored.headers[_EMBEDDINGS].shape[0] if _EMBEDDINGS in stored.headers else config.vocab_size
    vocabulary = vocabulary_of(directory, tokenizer, rows)
    planned = _plan(stored, config, family, TYPES[tensor_type])
    writer = gguf.GGUFWriter(file, family.architecture)
    try:
        _describe(writer, family, metadata(config, family) | {"vocab_size": rows}, vocabulary)
        writer.add_name(name)
        writer.add_file_type(_FILE_TYPES[tensor_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for tensor in planned:
            of_bytes = gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind)
            shape = of_bytes if tensor.kind == gguf.GGMLQuantizationType.Q8_0 else tensor.shape
            dtype = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
            writer.add_tensor_info(
                tensor.name, shape, np.dtype(dtype.get(tensor.kind, np.uint8)), int(np.prod(of_bytes)), tensor.kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in planned:
            writer.write_tensor_data(tensor.stored())
        size = _whole_size(writer)
    finally:
        writer.close()
    # numpy writes through a buffer of its own, and says nothing of a disk that did not take the end of it.
    if file.stat().st_size != size:
        raise OSError(errno.ENOSPC, f"{file.stat().st_size:,} of {size:,} bytes were written", file.name)


def _whole_size(writer: gguf.GGUFWriter) -> int:
    """Return the bytes of a file whose last tensor was written."""
    assert writer.fout is not None
    return int(writer.fout[0].tell())


def _describe(writer: gguf.GGUFWriter, family: Family, values: dict[str, Any], vocabulary: Vocabulary) -> None:
    for key, value in values.items():
        full = f"{family.architecture}.{key}"
        match value:
            case str():
                writer.add_string(full, value)
            case float():
                writer.add_float32(full, value)
            case int():
                writer.add_uint32(full, value)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    for key, number in vocabulary.numbers.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", number)
    for key, switch in vocabulary.switches.items():
        writer.add_bool(f"tokenizer.ggml.{key}", switch)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)


def _plan(stored: StoredTensors, config: Any, family: Family, kind: gguf.GGMLQuantizationType) -> list[_Planned]:
    """Return the tensors of the file.

    Raises:
        ModelError: GGUF has no name for one; or the head is tied, and the directory has another one.
    """
    names = _names(config, family)
    planned = []
    for name, header in stored.headers.items():
        if name == _HEAD and config.tie_word_embeddings:
            _check_tied(stored)
            continue
        target = names(name)
        if target is None:
            raise ModelError(
                f"GGUF has no name for {name} {list(header.shape)} of a model of the family {family.architecture}. "
                "Nothing was written. Of a run with adapters, merged weights are exported."
            )
        planned.append(_Planned(target, header.shape, _kind(header.shape, kind), _loader(stored, name, config, family)))
    if (divisors := rotary_divisors(config)) is not None:
        planned.append(_Planned("rope_freqs.weight", divisors.shape, gguf.GGMLQuantizationType.F32, lambda: divisors))
    return planned


def _names(config: Any, family: Family) -> Callable[[str], str | None]:
    """Return what gives GGUF's name of a tensor of transformers; None for a tensor that it does not know."""
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    return lambda name: names.get_name(name, try_suffixes=(".weight", ".bias"))


def read_gguf(file: Path, config: Any, names: Iterable[str]) -> tuple[dict[str, torch.Tensor], str | None]:
    """Return tensors of a GGUF file in float32 by the names of transformers, and the chat template.

    Args:
        file: That `write_gguf` wrote.
        config: Of the model.
        names: Of its tensors; those that the file lacks are left out.
    """
    family = family_of(config)
    reader = gguf.GGUFReader(file)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    in_file, tensors = _names(config, family), {}
    for name in names:
        tensor = stored.get(in_file(name) or "")
        if tensor is None:
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if family.is_gemma and name.endswith("norm.weight"):
            values = values - 1
        if family.swaps_rotary and (".q_proj." in name or ".k_proj." in name):
            is_query = ".q_proj." in name
            values = in_halves(values, config.num_attention_heads if is_query else config.num_key_value_heads)
        tensors[name] = torch.from_numpy(values)
    field = reader.get_field("tokenizer.chat_template")
    return tensors, None if field is None else str(field.contents())


def _kind(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.F16 if shape[-1] % _BLOCK else kind


def _loader(stored: StoredTensors, name: str, config: Any, family: Family) -> Callable[[], Array]:
    def load() -> Array:
        values: Array = stored.read(name).to(torch.float32).numpy()
        if family.is_gemma and name.endswith("norm.weight"):
            values = values + 1
        if family.swaps_rotary and ".q_proj." in name:
            return in_pairs(values, config.num_attention_heads)
        if family.swaps_rotary and ".k_proj." in name:
            return in_pairs(values, config.num_key_value_heads)
        return values

    return load


def _check_tied(stored: StoredTensors) -> None:
    if _EMBEDDINGS in stored.headers and not torch.equal(stored.read(_HEAD), stored.read(_EMBEDDINGS)):
        raise ModelError(
            f"The configuration ties {_HEAD} to {_EMBEDDINGS}, and the two hold different numbers. GGUF keeps one of "
            "them. Nothing was written; set tie_word_embeddings as the model was trained."
        )
