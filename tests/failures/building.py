"""Cases about a model on its way from meta to its ranks: buffers that no file holds, and weights with two names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from holdfast import checkpoint
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.models.names import tied_names
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.recipes.sft import sft_step
from holdfast.training.saving.exports import export_run
from holdfast.training.setup.begin import Live, build_run
from tests.distributed.cases import reference, rows_of, settings
from tests.distributed.test_lora import examples
from tests.distributed.test_split_invariance import by_hand
from tests.failures.gradients import shard_blocks
from tests.failures.lab import Lab, Observed
from tests.tiny import tiny_directory, tiny_model

FREQUENCIES = "model.rotary_emb.inv_freq"
BY_HAND = 10000.0 ** (-np.arange(0, 8, 2) / 8)
"""Rotary frequencies of a head of 8 elements (Su et al., arXiv:2104.09864)."""


# 6.5: buffers that are stored nowhere


def leave_meta(world: World) -> dict[str, Any]:
    """Build on meta, shard, allocate, and load a whole state dict strictly; return the rotary frequencies."""
    whole = tiny_model("llama")
    with torch.device("meta"):
        model = type(whole)(whole.config)
    shard_blocks(model, model.model.layers)
    torch.use_deterministic_algorithms(True)  # memory without a value is filled with NaN instead of what lay there
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    options = StateDictOptions(full_state_dict=True, strict=True)
    keys = set_model_state_dict(model, whole.state_dict(), options=options)
    return {
        "frequencies": dict(model.named_buffers())[FREQUENCIES].tolist(),
        "stored": FREQUENCIES in whole.state_dict(),
        "unloaded": [*keys.missing_keys, *keys.unexpected_keys],
    }


def naive_buffers(lab: Lab) -> Observed:
    found = lab.pool(2).run(leave_meta)[0]
    right = bool(np.allclose(found["frequencies"], BY_HAND, rtol=1e-6))
    words = f"a strict load reports nothing missing, and the rotary frequencies are {found['frequencies'][0]}, not 1.0"
    return Observed(right, words, found)


def frequencies_of_a_run(world: World, directory: str) -> list[float]:
    """Return the rotary frequencies of a run's policy."""
    training = build_run(from_mapping(settings(directory), SFTConfig), Path.cwd(), world, Live(rows=rows_of(8)))
    buffers = dict(training.model.module.named_buffers())
    return next(value for name, value in buffers.items() if name.endswith("rotary_emb.inv_freq")).tolist()


def ours_buffers(lab: Lab) -> Observed:
    directory = str(tiny_directory(lab.folder / "llama", "llama"))
    ranks = lab.pool(2).run(frequencies_of_a_run, directory)
    error = max(float(np.abs(np.array(found) / BY_HAND - 1).max()) for found in ranks)
    words = f"computed on the CPU, copied, compared on every rank; within {error:.0e} of the formula"
    return Observed(error < 1e-6, words, {"frequencies": ranks, "error": error})


# 6.6: one weight with two names


def shard_both_names(world: World) -> str:
    """Give the embedding and the head, which share a weight, a unit each, and train; return the error."""
    model = tiny_model("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    try:
        fully_shard(model.model.embed_tokens)
        fully_shard(model.lm_head)
        shard_blocks(model, model.model.layers)
        tokens = torch.arange(2, 18)[None]
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def save_whole(world: World, path: str) -> list[str]:
    """Save a tied model as DCP's tutorial does, under one root; return the names of the shared weight."""
    model = tiny_model("llama", tie_word_embeddings=True)
    shard_blocks(model, model.model.layers)
    dcp.save(get_model_state_dict(model), checkpoint_id=path)
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return sorted(name for name in stored if "embed_tokens" in name or "lm_head" in name)


def naive_ties(lab: Lab) -> Observed:
    error = lab.pool(2).run(shard_both_names)[0]
    names = lab.pool(2).run(save_whole, lab.path("tied"))[0]
    words = f"{error[:106]!r}; under one root it is stored {len(names)} times"
    return Observed(not error and len(names) == 1, words, {"error": error, "names": names})


def train_tied(world: World, directory: str, folder: str) -> dict[str, Any]:
    """Train one step, save and export; return the shared weight, its names, and what was written."""
    tree = settings(directory, run={"dir": folder, "name": "tied"})
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows_of(24)))
    sft_step(training)
    manifest = checkpoint.save(f"{folder}/checkpoints/step-00000001", training.model.module, training.model.optimizer)
    place = export_run(training, "last")
    embedding = full_tensor(sharded_parameters(training.model.module)["model.embed_tokens.weight"].detach())
    stored = [name for name in manifest.tensors if "embed_tokens" in name or "lm_head" in name]
    return {
        "weight": embedding.numpy(),
        "ties": tied_names(training.model.module),
        "stored": sorted(name for name in stored if name.startswith("model.")),
        "place": place,
    }


def ours_ties(lab: Lab) -> Observed:
    from safetensors import safe_open

    directory = str(tiny_directory(lab.folder / "llama", "llama", tie_word_embeddings=True))
    model = tiny_model("llama", tie_word_embeddings=True).double()
    expected = reference(model, [examples()[:8]], by_hand("token_mean"), 0.1)
    found = lab.pool(2).run(train_tied, directory, lab.path("run"))[0]
    with safe_open(Path(found["place"]) / "model.safetensors", "pt") as file:
        exported = [name for name in file.keys() if "embed_tokens" in name or "lm_head" in name]  # noqa: SIM118
    error = float(abs(found["weight"] - expected["parameters"]["model.embed_tokens.weight"]).max())
    words = f"one unit, trained as plain transformers trains it (error {error:.0e}), stored and exported once"
    numbers = found | {"exported": exported, "error": error}
    return Observed(error < 1e-10 and len(found["stored"]) == len(exported) == 1, words, numbers)
