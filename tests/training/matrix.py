"""The walk of one architecture: shard, train, save, verify, resume on one rank, export, reload, compare."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel

from holdfast.checkpoint import verify
from holdfast.config.load import from_mapping
from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import Share, pack
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.metrics.sink import read_metrics
from holdfast.models.chunks.logits import HeadWeights, logits_of
from holdfast.models.files.vision import image_side
from holdfast.models.layers.llama4_output import give_image_outputs
from holdfast.models.setup.model import configured
from holdfast.parallel.mesh import World
from holdfast.recipes.sft import sft_step
from holdfast.training.evaluate import evaluate
from holdfast.training.fit import fit
from holdfast.training.setup.begin import Live, build_run
from holdfast.types import Example
from tests.distributed.cases import rows_of
from tests.models.architectures import settings_of
from tests.models.directories import BLIND, write_directory
from tests.tiny import COMMON, tiny_model
from tests.vision import PROCESSORS, picture_rows, tokenizer_of, vision_directory
from tests.vision_derived import KINDS as DERIVED
from tests.vision_derived import derived_directory, derived_side, tokenizer_in

MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v3", "phimoe")
VISION = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "llava", "idefics3", "smolvlm")
ARCHITECTURES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "smollm3", "glm4"),
    *("cohere2", "falcon", "starcoder2", "stablelm", "falcon_h1", "gpt2", "recurrent_gemma", "llama4_text"),
    *("minicpm3", "dbrx", "mpt", "gpt_neo", "bart"),
    *MIXTURES,
    *VISION,
    *DERIVED,
    *(kind for kind in BLIND if kind not in DERIVED),
)
"""transformers' model_type of each row; falcon_h1 has Mamba layers beside attention."""
LARGEST_DIFFERENCE = 1e-5
"""Of a logit: between the trained, sharded policy and plain transformers on its export, over the whole vocabulary."""


@dataclass(frozen=True)
class Walked:
    """What one architecture did."""

    model_type: str
    parameters: int
    attention: str
    """`packed`, or `one document per row`."""
    moved: float
    """Largest change of a logit by the three updates: the runs did train."""
    difference: float
    """See `LARGEST_DIFFERENCE`."""
    adapter_difference: float = 0.0
    """The same, of peft with the base and the exported adapter; 0 without one."""


def walk(
    pools: Any, model_type: str, place: Path, lora: dict[str, Any] | None = None, *, frozen: str = "auto"
) -> Walked:
    """Take one architecture all the way.

    Args:
        pools: number of ranks -> rank pool.
        model_type: One of `ARCHITECTURES`.
        place: An empty directory.
        lora: Section `model.lora`, or None.
        frozen: `checkpoint.frozen`.
    """
    model = place / "model"
    rows = picture_rows(24) if model_type in (*VISION, *DERIVED) else rows_of(24)
    if model_type in VISION:
        vision_directory(model, model_type)
    elif model_type in DERIVED:
        derived_directory(model, model_type)
    elif model_type in BLIND:
        write_directory(model, model_type)
    else:
        _text_directory(model, model_type)
    examples = _examples(model, model_type, rows)
    before = plain_logits(model, examples)

    pools(2).run(trained, _values(place, model, 2, lora, frozen), rows, [])
    (saved,) = (place / "r/checkpoints").glob("step-*")
    verify(str(saved), "tensors")
    (found,) = pools(1).run(trained, _values(place, model, 3, lora, frozen), rows, examples)
    steps = [line["step"] for line in read_metrics(place / "r/metrics.jsonl") if "loss" in line]
    assert steps == [1, 2, 3], f"the run on one rank did not go on at step 3: {steps}"

    after = plain_logits(Path(found["export"]), examples)
    ours = found["logits"]
    adapter = None if lora is None else place / "r/exports/final-adapter"
    beside = ours if adapter is None else plain_logits(model, examples, adapter)
    return Walked(
        model_type,
        found["parameters"],
        "packed" if found["packed"] else "one document per row",
        _furthest(before, after),
        _furthest(ours, after),
        _furthest(ours, beside),
    )


def _furthest(ones: list[NDArray[np.float32]], others: list[NDArray[np.float32]]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(ones, others, strict=True))


def trained(world: World, values: dict[str, Any], rows: Any, examples: list[Example]) -> dict[str, Any]:
    """Train to the end and return the export, and what the trained policy itself says of the examples."""
    training = build_run(from_mapping(values, SFTConfig), Path.cwd(), world, Live(rows=rows))
    outcome = fit(training, partial(sft_step, training), partial(evaluate, training.evaluation))
    training.model.module.eval()
    logits: list[NDArray[np.float32]] = []

    def look(hidden: torch.Tensor, head: HeadWeights) -> None:
        logits.append(logits_of(hidden, head, training.model.module.head_spec)[0].numpy())

    for example in examples:
        training.model.module.show_predictors(
            pack([example], [Share(1.0, 1.0)], padded=training.model.module.padded), look
        )
    return {
        "export": str(outcome.export),
        "packed": not training.model.module.padded,
        "parameters": sum(value.numel() for value in training.model.module.parameters()),
        "logits": logits,
    }


def plain_logits(directory: Path, examples: list[Example], adapter: Path | None = None) -> list[NDArray[np.float32]]:
    """Return the logits [N, V] that predict the compared tokens, by plain transformers, and peft, from directories."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    give_image_outputs()  # transformers' own forward pass of Llama 4 fails without
    config = AutoConfig.from_pretrained(directory)
    model_type = config.model_type
    auto = AutoModelForImageTextToText if model_type in (*VISION, *DERIVED, *BLIND) else AutoModelForCausalLM
    # By default transformers 5.19 computes Gemma 2 without the soft cap of its attention, and warns.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    model = auto.from_pretrained(directory, dtype="float32", attn_implementation="eager" if capped else None).eval()
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft reads what transformers renamed
            model = PeftModel.from_pretrained(model, adapter).eval()
    if model_type == "blip-2":
        model = model.language_model  # it runs without an image, and the whole does not
    side = _side(directory, model_type)
    found = []
    for example in examples:
        tokens = torch.as_tensor(example.tokens)[None]
        given = side.upstream_inputs(example.tokens, example.model_inputs) if isinstance(side, ImageSide) else {}
        with torch.no_grad():
            logits = model(input_ids=tokens, **{name: torch.as_tensor(value) for name, value in given.items()}).logits
        found.append(logits[0, :-1].numpy()[example.loss_mask[1:]])
    return found


def _values(place: Path, model: Path, steps: int, lora: dict[str, Any] | None, frozen: str) -> dict[str, Any]:
    padded = {"packing": "none", "tokens_per_micro_batch": 512} if _type_of(model) == "gemma3" else {}
    if _is_derived(model):  # whose processors write more tokens
        padded = {"max_length": 256, "tokens_per_micro_batch": 512}
    return {
        "steps": steps,
        "run": {"dir": str(place), "name": "r"},
        "model": {"path": str(model), "dtype": "float32"} | ({} if lora is None else {"lora": lora}),
        "data": {"path": "rows", "batch_size": 8, "max_length": 128, "tokens_per_micro_batch": 256} | padded,
        "optim": {"lr": 2e-3, "schedule": "constant"},
        "parallel": {"compute_dtype": "float32"},
        "metrics": {"progress": "off"},
        "checkpoint": {"every_steps": 2, "frozen": frozen, "rehearsal": False},
    }


def _is_derived(directory: Path) -> bool:
    """Whether the family is known by its processor alone, whose file lies in the directory and its exports."""
    return (directory / "processor_config.json").exists()


def _type_of(directory: Path) -> str:
    from transformers import AutoConfig

    return str(AutoConfig.from_pretrained(directory).model_type)


def _text_directory(path: Path, model_type: str) -> None:
    """Save a tiny model with attention far from uniform, and a tokenizer, as plain transformers does."""
    model = tiny_model(model_type, **settings_of(model_type))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
    model.save_pretrained(path)
    character_tokenizer().save_pretrained(path)


def _side(directory: Path, model_type: str) -> ImageSide | str:
    if _is_derived(directory):
        return derived_side(directory)
    if model_type not in PROCESSORS:
        return ""
    raw_config, processor = configured(ModelConfig(path=str(directory)), Path.cwd())
    return image_side(processor, tokenizer_of(model_type), raw_config)


def _examples(directory: Path, model_type: str, rows: list[dict[str, Any]]) -> list[Example]:
    """Return sequences to compare: random tokens longer than every window, and where the model sees, rows with images.

    All of their tokens are scored but those of images, which nothing is asked to predict.
    """
    generator = np.random.default_rng(3)
    texts = [generator.integers(2, COMMON["vocab_size"] - 16, length) for length in (38, 21)]
    found = [Example(-1 - number, 0, tokens, np.arange(tokens.size) > 0) for number, tokens in enumerate(texts)]
    side = _side(directory, model_type)
    if isinstance(side, ImageSide):
        tokenizer = tokenizer_in(directory) if _is_derived(directory) else tokenizer_of(model_type)
        tokeniser = RowTokeniser(tokenizer, DataConfig(path="rows", max_length=256), Path.cwd(), side)
        seen = [tokeniser.examples(row, index, "rows").examples[0] for index, row in enumerate(rows[:3])]
        found += [
            replace(example, loss_mask=(np.arange(example.tokens.size) > 0) & (example.tokens != side.image_id))
            for example in seen
        ]
    return found
