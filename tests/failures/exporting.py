"""Cases about a run's state in the wrong place: offloaded, gathered, or left out of what is handed on."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast import checkpoint
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.mesh import World
from holdfast.recipes.sft import sft_step
from holdfast.training.saving.exports import export_run
from holdfast.training.setup.begin import Live, build_run
from tests.distributed.cases import rows_of, settings
from tests.distributed.lora_cases import probe
from tests.failures.gradients import shard_blocks
from tests.failures.lab import Lab, Observed
from tests.tiny import tiny_directory, tiny_model

GENERATION = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": 1, "pad_token_id": 0}
TOKENS = torch.arange(2, 40)[None]


def handed_in(path: Path) -> Path:
    """Write a model directory whose generation settings are its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_directory(path, "llama"))
    for name, value in GENERATION.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(path)
    return path


def generation_of(path: Path | str) -> dict[str, Any]:
    """Return the generation settings of a model directory that `handed_in` set."""
    found = json.loads((Path(path) / "generation_config.json").read_text())
    return {name: found.get(name) for name in GENERATION}


def save_adapters(world: World, path: str) -> str:
    """Let peft save the adapters of a sharded model on the first rank, as its own loop does; return the error."""
    from peft import LoraConfig, get_peft_model

    warnings.simplefilter("ignore")
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj"]))
    shard_blocks(model, model.base_model.model.model.layers)
    if world.rank == 0:
        try:
            model.save_pretrained(path)
        except RuntimeError as error:
            return str(error)
    return ""


def merge(source: Path, target: Path) -> None:
    """Make a model directory from a configuration and a state dict, as scripts that merge shards do."""
    from transformers import AutoConfig, AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(source).state_dict()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    model.load_state_dict(weights)
    model.save_pretrained(target)


def naive_handed_on(lab: Lab) -> Observed:
    source, target = handed_in(lab.folder / "source"), lab.folder / "merged"
    merge(source, target)
    lost = sorted(name for name, value in generation_of(target).items() if value != GENERATION[name])
    tokenizer = (target / "tokenizer.json").exists()
    error = lab.pool(2).run(save_adapters, lab.path("adapters"))[0]
    words = (
        f"a merged directory has lost {', '.join(lost)}{'' if tokenizer else ' and the tokenizer'}; peft's "
        f"save_pretrained of sharded adapters: {error[:80]!r}"
    )
    return Observed(not lost and tokenizer and not error, words, {"lost": lost, "tokenizer": tokenizer, "error": error})


def hand_on(world: World, directory: str, folder: str) -> dict[str, Any]:
    """Train adapters with weights in host memory; evaluate, then save, export and go on."""
    tree = settings(
        directory,
        model={"dtype": "float32", "lora": {"rank": 4, "alpha": 8.0}},
        parallel={"cpu_offload": True},
        run={"dir": folder, "name": "lora"},
    )
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows_of(24)))
    sft_step(training)
    probe(training.model.module)  # leaves units gathered, outside host memory
    checkpoint.save(f"{folder}/checkpoints/step-00000001", training.model.module, training.model.optimizer)
    probe(training.model.module)
    place = export_run(training, "last")
    update = sft_step(training)
    assert update is not None
    metrics = update.read().metrics
    return {"place": place, "next": metrics["loss"]}


def straight_on(world: World, directory: str) -> float:
    """Return the loss of the second step of the same run, of which nothing was saved or exported."""
    tree = settings(
        directory,
        model={"dtype": "float32", "lora": {"rank": 4, "alpha": 8.0}},
        parallel={"cpu_offload": True},
    )
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows_of(24)))
    sft_step(training)
    update = sft_step(training)
    assert update is not None
    metrics = update.read().metrics
    return metrics["loss"]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=TOKENS).logits
    return found


def ours_handed_on(lab: Lab) -> Observed:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    source = handed_in(lab.folder / "source")
    found = lab.pool(2).run(hand_on, str(source), lab.path("run"))[0]
    straight = lab.pool(2).run(straight_on, str(source))[0]
    place = Path(found["place"])
    base = logits(AutoModelForCausalLM.from_pretrained(source))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), f"{place}-adapter")
    merged = logits(AutoModelForCausalLM.from_pretrained(place))
    gap = float((logits(adapted) - merged).abs().max())
    moved = float((merged - base).abs().max())
    same = (place / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    numbers = {
        "generation": generation_of(place),
        "tokenizer": same,
        "gap": gap,
        "moved": moved,
        "next": found["next"] - straight,
    }
    words = (
        "saved and exported after an evaluation with weights in host memory; settings and tokenizer are there, peft "
        f"and the merged model agree within {gap:.0e} (trained by {moved:.3f}), and the next loss is what it is without"
    )
    holds = numbers["generation"] == GENERATION and same and gap < 1e-5 < moved and numbers["next"] == 0.0
    return Observed(holds, words, numbers)
