"""Values that are right one by one and wrong together: each refusal, its place, and the way out it names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.config.verbs.training import SFTConfig
from tests.config.conftest import WHOLE, Mistakes
from tests.messages import assert_only

Load = Callable[..., SFTConfig]
ROWS = "data: {path: rows.jsonl}\n"
MODEL = "model: {path: some-model}\n"


@pytest.mark.parametrize(
    ("text", "at", "named"),
    [
        (MODEL + ROWS, "run.yaml: steps", "max_minutes"),
        (MODEL + ROWS + "max_minutes: 5\n", "run.yaml: optim.schedule", "optim.schedule"),
        (
            MODEL + ROWS + "max_minutes: 5\noptim: {schedule: {kind: constant, warmup_ratio: 0.1}}\n",
            "run.yaml:4: optim.schedule",
            "warmup_ratio optim.schedule",
        ),
        (
            MODEL + ROWS + "max_minutes: 5\noptim: {schedule: {kind: inverse_sqrt, warmup_ratio: 0.1}}\n",
            "run.yaml:4: optim.schedule",
            "warmup_ratio optim.schedule",
        ),
        (
            MODEL + ROWS + "max_minutes: 5\noptim: {schedule: cosine_with_restarts}\n",
            "run.yaml:4: optim.schedule",
            "cosine_with_restarts optim.schedule",
        ),
        (WHOLE + "min_steps: 4\n", "run.yaml:4: min_steps", "4 steps=3 min_steps"),
        (WHOLE + "limit_batches: 2\noverfit_batches: 2\n", "run.yaml:4: limit_batches", "overfit_batches"),
        ("steps: 1\n" + ROWS + "model: {path: m, dtype: bfloat16}\n", "run.yaml:3: model.dtype", "optim.kind 1 256"),
        (WHOLE + "optim: adamw_bf16\n", "run.yaml:4: optim.kind", "adamw_bf16 model.dtype optim.kind"),
        (
            "steps: 1\n" + ROWS + "model: {path: m, dtype: float64}\nparallel: {compute_dtype: bfloat16}\n",
            "run.yaml:4: parallel.compute_dtype",
            "model.dtype",
        ),
        (
            WHOLE + "evaluation:\n  every_steps: 5\n",
            "run.yaml:5: evaluation.every_steps",
            "evaluation.sets data.validation_split",
        ),
        (
            WHOLE + "stop_when: {metric: eval/s/loss, mode: min}\nevaluation: {sets: {s: {path: x}}}\n",
            "run.yaml:4: stop_when.metric",
            "evaluation.every_steps",
        ),
        (
            WHOLE + "optim: {schedule: {kind: plateau, metric: eval/t/loss, mode: min}}\n"
            "evaluation: {sets: {s: {path: x}}, every_steps: 5}\n",
            "run.yaml:4: optim.schedule.metric",
            "metrics.jsonl",
        ),
        (
            WHOLE + "evaluation: {sets: {validation: {path: x}}}\n",
            "run.yaml:4: evaluation.sets.validation",
            "'validation' data.validation_split",
        ),
        (
            WHOLE + "optim: {schedule: {warmup_steps: 5, warmup_ratio: 0.1}}\n",
            "run.yaml:4: optim.schedule.warmup_steps",
            "warmup_steps=5 warmup_ratio=0.1",
        ),
        (
            WHOLE + "parallel:\n  recompute: {kind: full, use_reentrant: true}\n",
            "run.yaml:5: parallel.recompute.use_reentrant",
            "",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, router_loss: {kind: sequence, coefficient: 0}}\n",
            "run.yaml:3: model.router_loss.coefficient",
            "0 router_loss",
        ),
        (
            "steps: 1\ndata: {path: a, batch_size: 8, max_length: 1024}\nmodel: {path: m, router_loss: batch}\n",
            "run.yaml:3: model.router_loss",
            "8 data.max_length=1024 data.tokens_per_micro_batch=4096",
        ),
        (
            "steps: 1\ndata: {path: a, batch_size: 4}\nlaunch: {ranks: 2}\nmodel: {path: m, router_loss: batch}\n",
            "run.yaml:4: model.router_loss",
            "launch.ranks=2 router_loss allow_split",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, lora: {dora: true, experts: all}}\n",
            "run.yaml:3: model.lora.dora",
            "",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, lora: {dropout: 0.1, experts: all}}\n",
            "run.yaml:3: model.lora.dropout",
            "",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, lora: {dora: true, quantize: nf4}}\n",
            "run.yaml:3: model.lora.dora",
            "",
        ),
        ("steps: 1\n" + ROWS + "model: {path: m, lora: {any_base: true}}\n", "run.yaml:3: model.lora.any_base", ""),
        (
            WHOLE.replace("path: some-model", "path: m, lora: {quantize: nf4}") + "parallel: {compile: blocks}\n",
            "run.yaml:4: parallel.compile",
            "model.lora.quantize",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, router_loss: {kind: global, coefficient: 0.1}}\n",
            "run.yaml:3: model.router_loss",
            "sequence batch",
        ),
        ("steps: 1\nmodel: {dtype: float32}\n" + ROWS, "run.yaml:2: model.path", ""),
        ("steps: 1\nmodel: {path: m, config: {model_type: llama}}\n" + ROWS, "run.yaml:2: model.config", ""),
        (
            "steps: 1\nmodel: {config: {hidden_size: 8}, tokenizer: t}\n" + ROWS,
            "run.yaml:2: model.config",
            "model_type hidden_size 128",
        ),
        ("steps: 1\nmodel: {config: {model_type: llama}}\n" + ROWS, "run.yaml:2: model.tokenizer", ""),
        ("steps: 1\n" + MODEL + "data: {batch_size: 4}\n", "run.yaml:3: data.path", ""),
        ("steps: 1\n" + MODEL + "data: {path: a, synthetic: {task: sort}}\n", "run.yaml:3: data.synthetic", ""),
        ("steps: 1\n" + MODEL + "data: {sources: [{name: a}]}\n", "run.yaml:3: data.sources.0.path", ""),
        (
            "steps: 1\n" + MODEL + "data:\n  sources:\n    - {path: a, weight: 2}\n    - {path: b}\n",
            "run.yaml:6: data.sources.1.weight",
            "",
        ),
        (
            "steps: 1\n" + MODEL + "data:\n  sources: [{path: a}]\n  columns: {prompt: question}\n",
            "run.yaml:5: data.columns",
            "data.sources",
        ),
        (
            "steps: 1\n" + MODEL + "data: {path: a, max_length: 8192}\n",
            "run.yaml:3: data.max_length",
            "8192 tokens_per_micro_batch=4096 max_length",
        ),
        (
            "steps: 1\n" + MODEL + "data: {path: a, max_length: 9000}\nparallel: {context: 2}\n",
            "run.yaml:3: data.max_length",
            "9000 parallel.context=2 tokens_per_micro_batch=4096",
        ),
        (
            "steps: 1\n" + MODEL + "data: {path: a, packing: none}\nparallel: {context: 2}\n",
            "run.yaml:4: parallel.context",
            "2 data.packing",
        ),
        (
            "steps: 1\n" + MODEL + "data: {path: a, packing: wrapped, average: prompt_mean}\n",
            "run.yaml:3: data.average",
            "prompt_mean token_mean best_fit",
        ),
        (
            "steps: 1\n" + MODEL + "data: {synthetic: {task: sort, min_length: 9}}\n",
            "run.yaml:3: data.synthetic.min_length",
            "9 max_length=6",
        ),
        ("steps: 1\n" + MODEL + "data: {path: a, validation_split: 1}\n", "run.yaml:3: data.validation_split", "1"),
        (
            "steps: 3\n" + ROWS + "model: {path: m, freeze: [mlp], unfreeze: {at_step: 1, patterns: [mlp]}}\n",
            "run.yaml:3: model.unfreeze",
            "checkpoint.resume.unfreeze",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_way_out(
    mistakes: Mistakes, text: str, at: str, named: str
) -> None:
    assert_only(mistakes(text), at, named)


def test_all_broken_rules_are_told_at_once(mistakes: Mistakes) -> None:
    text = "steps: 1\nmin_steps: 2\n" + ROWS + "model: {path: m, dtype: bfloat16}\nevaluation: {every_epochs: 1}\n"

    assert [mistake.key for mistake in mistakes(text)] == [
        "min_steps",
        "model.dtype",
        "evaluation.every_epochs",
    ]


@pytest.mark.parametrize(
    "lines",
    [
        "max_minutes: 5\noptim: {schedule: constant}\n",
        "max_minutes: 5\noptim: {schedule: {kind: constant, warmup_steps: 5}}\n",
        "epochs: 0.5\n",
        "dry_run: true\n",
        "steps: 3\nmin_steps: 3\n",
        "steps: 3\nevaluation: {every_steps: 5, sets: {a: {path: x}}}\n",
        "steps: 3\noptim: {schedule: {kind: linear, warmup_steps: 5}}\n",
    ],
)
def test_what_does_go_together_is_taken(read: Load, lines: str) -> None:
    read(MODEL + ROWS + lines)


def test_several_sources_without_weights_are_taken(read: Load) -> None:
    config = read("steps: 1\n" + MODEL + "data: {sources: [{path: a}, {synthetic: {task: add}}]}\n")

    assert [source.path for source in config.data.all_sources()] == ["a", None]


def test_one_source_in_place_is_the_same_as_a_list_of_one(read: Load) -> None:
    in_place = read("steps: 1\n" + MODEL + "data: {path: a, columns: {prompt: q}, max_samples: 5}\n")
    listed = read("steps: 1\n" + MODEL + "data: {sources: [{path: a, columns: {prompt: q}, max_samples: 5}]}\n")

    assert in_place.data.all_sources() == listed.data.all_sources()
