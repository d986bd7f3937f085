"""Write a model directory whose matrices are FP8 or INT8, in the format of compressed-tensors, which vLLM reads.

Each row of a matrix has a scale of its own; activations are quantised by the program that serves, token by token. No
data is needed. The head, embeddings and norms stay as they are. One file of weights is in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import Tensor

from holdfast.errors import ModelError
from holdfast.models.files.conversion import Header
from holdfast.models.files.safetensors_files import INDEX, StoredTensors, index_json, plan_files

SCHEMES = {"fp8": ("FP8_DYNAMIC", "float-quantized"), "int8": ("W8A8", "int-quantized")}
"""Type to the preset and the layout of compressed-tensors."""
_FILE_BYTES = 5_000_000_000
_LEFT = ("*.safetensors", INDEX, "README*", "holdfast*")
"""What is not copied from the export."""


def write_compressed(directory: Path, target: Path, tensor_type: str, config: Any) -> None:
    """Write weights, configuration and tokenizer.

    Args:
        directory: A model directory of transformers, adapters merged.
        target: An empty directory.
        tensor_type: A name in `SCHEMES`.
        config: As transformers read it from the directory.

    Raises:
        ModelError: It is no causal language model, a layer has no matrix in the files, or a number is not finite.
    """
    preset, layout = SCHEMES[tensor_type]
    stored = StoredTensors(directory)
    layers = _layers(config, stored)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    headers = dict(_headers(stored, layers, torch.float8_e4m3fn if tensor_type == "fp8" else torch.int8))
    files = plan_files(headers, _FILE_BYTES)
    for name, members in files.items():
        tensors: dict[str, Tensor] = {}
        for member in members:
            if member not in tensors:
                tensors |= dict(_stored(stored, member, layers, scheme.weights))
        save_file({member: tensors[member] for member in members}, target / name, {"format": "pt"})
    if len(files) > 1:
        (target / INDEX).write_text(index_json(files, headers), encoding="utf-8")
    shutil.copytree(directory, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_LEFT))
    described = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format=layout,
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    values = json.loads((target / "config.json").read_text(encoding="utf-8"))
    values["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "version": compressed_tensors.__version__,
        **described.model_dump(mode="json", exclude={"quant_method"}),
    }
    (target / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _layers(config: Any, stored: StoredTensors) -> set[str]:
    """Return the names of the matrices that are quantised.

    Raises:
        ModelError: transformers makes no causal language model of the configuration, or a layer has no matrix.
    """
    from transformers import AutoModelForCausalLM

    architecture = (config.architectures or [type(config).__name__])[0]
    if not architecture.endswith("ForCausalLM"):
        raise ModelError(
            f"{architecture} is no causal language model, and FP8 or INT8 is written of those. Nothing was written."
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
    }
    if lacking := sorted(names - stored.headers.keys()):
        raise ModelError(
            f"{lacking[0]} of a {architecture} stands under another name in its files, so it cannot be written as FP8 "
            "or INT8. Nothing was written."
        )
    return names


def _headers(stored: StoredTensors, layers: set[str], dtype: torch.dtype) -> Iterator[tuple[str, Header]]:
    for name, header in stored.headers.items():
        if name not in layers:
            yield name, header
            continue
        yield name, header._replace(dtype=dtype)
        yield f"{name}_scale", Header((header.shape[0], 1), header.dtype)


def _stored(stored: StoredTensors, member: str, layers: set[str], arguments: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of the files, and the scales beside it."""
    name = member.removesuffix("_scale") if member.removesuffix("_scale") in layers else member
    values = stored.read(name)
    if name not in layers:
        yield name, values
        return
    if not values.isfinite().all():
        raise ModelError(f"{name} holds a number that is not finite. Nothing was written; take the step before.")
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    scale, zero = calculate_qparams(low, high, arguments)
    kind = torch.float8_e4m3fn if arguments.type == "float" else torch.int8
    yield name, quantize(values, scale, zero, arguments, dtype=kind)
    yield f"{name}_scale", scale.to(values.dtype)
