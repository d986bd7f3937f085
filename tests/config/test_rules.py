"""Values that are right one by one and wrong together: each refusal, its place, and the way out it names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.config.verbs.training import SFTConfig
from tests.config.conftest import WHOLE

Load = Callable[..., SFTConfig]
Mistakes = Callable[..., list[str]]
ROWS = "data: {path: rows.jsonl}\n"
MODEL = "model: {path: some-model}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MODEL + ROWS, "run.yaml: steps: the run has no end; set steps, epochs or max_minutes"),
        (
            MODEL + ROWS + "max_minutes: 5\n",
            "run.yaml: optim.schedule: cosine needs to know the last step; set steps or epochs, or use optim.schedule: "
            "constant",
        ),
        (
            MODEL + ROWS + "max_minutes: 5\noptim: {schedule: {kind: constant, warmup_ratio: 0.1}}\n",
            "run.yaml:4: optim.schedule: warmup_ratio needs to know the last step; set steps or epochs, or use "
            "optim.schedule: constant",
        ),
        (
            MODEL + ROWS + "max_minutes: 5\noptim: {schedule: {kind: inverse_sqrt, warmup_ratio: 0.1}}\n",
            "run.yaml:4: optim.schedule: warmup_ratio needs to know the last step; set steps or epochs, or use "
            "optim.schedule: constant",
        ),
        (
            MODEL + ROWS + "max_minutes: 5\noptim: {schedule: cosine_with_restarts}\n",
            "run.yaml:4: optim.schedule: cosine_with_restarts needs to know the last step; set steps or epochs, or use "
            "optim.schedule: constant",
        ),
        (WHOLE + "min_steps: 4\n", "run.yaml:4: min_steps: 4 is above steps=3; lower min_steps or raise steps"),
        (
            WHOLE + "limit_batches: 2\noverfit_batches: 2\n",
            "run.yaml:4: limit_batches: overfit_batches limits the batches already; keep one of the two",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, dtype: bfloat16}\n",
            "run.yaml:3: model.dtype: bfloat16 with optim.kind: adamw loses updates smaller than 1/256 of a weight. "
            "Use optim.kind: adamw_bf16, or model.dtype: float32 (compute stays bfloat16 on a GPU)",
        ),
        (
            WHOLE + "optim: adamw_bf16\n",
            "run.yaml:4: optim.kind: adamw_bf16 needs model.dtype: bfloat16, not float32; set it, or use optim.kind: "
            "adamw",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, dtype: float64}\nparallel: {compute_dtype: bfloat16}\n",
            "run.yaml:4: parallel.compute_dtype: bfloat16 with model.dtype: float64, which computes in float64; "
            "leave it at auto",
        ),
        (
            WHOLE + "evaluation:\n  every_steps: 5\n",
            "run.yaml:5: evaluation.every_steps: there is nothing to evaluate on; set evaluation.sets or "
            "data.validation_split",
        ),
        (
            WHOLE + "stop_when: {metric: eval/s/loss, mode: min}\nevaluation: {sets: {s: {path: x}}}\n",
            "run.yaml:4: stop_when.metric: eval/s/loss is never measured while the run goes on; set "
            "evaluation.every_steps",
        ),
        (
            WHOLE + "optim: {schedule: {kind: plateau, metric: eval/t/loss, mode: min}}\n"
            "evaluation: {sets: {s: {path: x}}, every_steps: 5}\n",
            "run.yaml:4: optim.schedule.metric: eval/t/loss is of no evaluation set (there are s); write "
            "eval/SET/METRIC as in metrics.jsonl",
        ),
        (
            WHOLE + "evaluation: {sets: {validation: {path: x}}}\n",
            "run.yaml:4: evaluation.sets.validation: the name 'validation' belongs to data.validation_split; choose "
            "another",
        ),
        (
            WHOLE + "optim: {schedule: {warmup_steps: 5, warmup_ratio: 0.1}}\n",
            "run.yaml:4: optim.schedule.warmup_steps: warmup_steps=5 and warmup_ratio=0.1 both set the warm-up; keep "
            "one of them",
        ),
        (
            WHOLE + "parallel:\n  recompute: {kind: full, use_reentrant: true}\n",
            "run.yaml:5: parallel.recompute.use_reentrant: true loses gradients without a word: the reentrant form "
            "hides a cache that recomputation fills a second time (key and value weights get zero gradients) and "
            "cuts the router loss of experts off. Remove the key: the non-reentrant form is always used",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, router_loss: {kind: sequence, coefficient: 0}}\n",
            "run.yaml:3: model.router_loss.coefficient: 0 leaves the router loss without effect; write router_loss: "
            "off, or a factor above 0",
        ),
        (
            "steps: 1\ndata: {path: a, batch_size: 8, max_length: 1024}\nmodel: {path: m, router_loss: batch}\n",
            "run.yaml:3: model.router_loss: batch balances what one forward pass sees, and 8 rows of up to "
            "data.max_length=1024 tokens do not fit data.tokens_per_micro_batch=4096, so its result would depend on "
            "the split. Use sequence or global, which do not, or accept it: router_loss: {kind: batch, allow_split: "
            "true}",
        ),
        (
            "steps: 1\ndata: {path: a, batch_size: 4}\nlaunch: {ranks: 2}\nmodel: {path: m, router_loss: batch}\n",
            "run.yaml:4: model.router_loss: batch balances what one forward pass sees, and launch.ranks=2 sees a part "
            "of the batch each, so its result would depend on the split. Use sequence or global, which do not, or "
            "accept it: router_loss: {kind: batch, allow_split: true}",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, lora: {dora: true, experts: all}}\n",
            "run.yaml:3: model.lora.dora: peft has no DoRA for stacks of experts; leave out experts, or dora",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, lora: {dropout: 0.1, experts: all}}\n",
            "run.yaml:3: model.lora.dropout: an expert's adapter is added to its matrix, where nothing can be dropped; "
            "leave out one",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, lora: {dora: true, quantize: nf4}}\n",
            "run.yaml:3: model.lora.dora: peft reads the rows of W for it at every step, and quantize: nf4 packs them; "
            "choose one of the two",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, lora: {any_base: true}}\n",
            "run.yaml:3: model.lora.any_base: there are no adapters to accept; set path, or leave it out",
        ),
        (
            WHOLE.replace("path: some-model", "path: m, lora: {quantize: nf4}") + "parallel: {compile: blocks}\n",
            "run.yaml:4: parallel.compile: blocks, but model.lora.quantize computes with matrices that are made anew "
            "in every forward pass, which is not built for compiled blocks; use auto",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, dropout: true, router_loss: global}\n",
            "run.yaml:3: model.dropout: model.router_loss: global counts loads in a forward pass of its own, where "
            "dropout differs; leave dropout off, or use router_loss: sequence",
        ),
        (
            "steps: 1\n" + ROWS + "model: {path: m, router_loss: global}\nneftune_alpha: 5\n",
            "run.yaml:4: neftune_alpha: model.router_loss: global counts loads in a forward pass of its own, which has "
            "no noise; leave neftune_alpha out, or use router_loss: sequence",
        ),
        (
            "steps: 1\nmodel: {dtype: float32}\n" + ROWS,
            "run.yaml:2: model.path: no model is named; set path (a directory or hub name) or config (a random start)",
        ),
        (
            "steps: 1\nmodel: {path: m, config: {model_type: llama}}\n" + ROWS,
            "run.yaml:2: model.config: both path (existing weights) and config (random start) are set; keep one of "
            "them",
        ),
        (
            "steps: 1\nmodel: {config: {hidden_size: 8}, tokenizer: t}\n" + ROWS,
            "run.yaml:2: model.config: model_type is missing; write for example config: {model_type: llama, "
            "hidden_size: 128}",
        ),
        (
            "steps: 1\nmodel: {config: {model_type: llama}}\n" + ROWS,
            "run.yaml:2: model.tokenizer: a random start has no tokenizer of its own; set tokenizer to a directory, "
            "a hub name or builtin:characters",
        ),
        (
            "steps: 1\n" + MODEL + "data: {batch_size: 4}\n",
            "run.yaml:3: data.path: no rows are named; set one of path, synthetic, sources",
        ),
        (
            "steps: 1\n" + MODEL + "data: {path: a, synthetic: {task: sort}}\n",
            "run.yaml:3: data.synthetic: rows come from path and synthetic at once; keep one of them",
        ),
        (
            "steps: 1\n" + MODEL + "data: {sources: [{name: a}]}\n",
            "run.yaml:3: data.sources.0.path: no rows are named; set one of path, synthetic",
        ),
        (
            "steps: 1\n" + MODEL + "data:\n  sources:\n    - {path: a, weight: 2}\n    - {path: b}\n",
            "run.yaml:6: data.sources.1.weight: missing, but other sources have one; set weight on all sources or on "
            "none",
        ),
        (
            "steps: 1\n" + MODEL + "data:\n  sources: [{path: a}]\n  columns: {prompt: question}\n",
            "run.yaml:5: data.columns: it speaks of one source, but there are several; write columns inside "
            "data.sources",
        ),
        (
            "steps: 1\n" + MODEL + "data: {path: a, max_length: 8192}\n",
            "run.yaml:3: data.max_length: 8192 does not fit tokens_per_micro_batch=4096; raise "
            "tokens_per_micro_batch to at least 8192, lower max_length, or let more ranks share a row "
            "(parallel.context: 2)",
        ),
        (
            "steps: 1\n" + MODEL + "data: {path: a, max_length: 9000}\nparallel: {context: 2}\n",
            "run.yaml:3: data.max_length: 9000 does not fit parallel.context=2 x tokens_per_micro_batch=4096; raise "
            "tokens_per_micro_batch to at least 4500, lower max_length, or let more ranks share a row "
            "(parallel.context: 3)",
        ),
        (
            "steps: 1\n" + MODEL + "data: {path: a, packing: none}\nparallel: {context: 2}\n",
            "run.yaml:4: parallel.context: 2 splits packed rows, and data.packing: none packs none; leave one of the "
            "two out",
        ),
        (
            "steps: 1\n" + MODEL + "data: {path: a, packing: wrapped, average: prompt_mean}\n",
            "run.yaml:3: data.average: prompt_mean has no meaning with packing: wrapped, which cuts documents at "
            "window edges; use average: token_mean or packing: best_fit",
        ),
        (
            "steps: 1\n" + MODEL + "data: {synthetic: {task: sort, min_length: 9}}\n",
            "run.yaml:3: data.synthetic.min_length: 9 is above max_length=6; lower one or raise the other",
        ),
        (
            "steps: 1\n" + MODEL + "data: {path: a, validation_split: 1}\n",
            "run.yaml:3: data.validation_split: 1 should be less than 1",
        ),
        (
            "steps: 3\n" + ROWS + "model: {path: m, freeze: [mlp], unfreeze: {at_step: 1, patterns: [mlp]}}\n",
            "run.yaml:3: model.unfreeze: there is no such key: a run trains the same parameters from its first step to "
            "its last; name what is frozen in freeze, and after that run go on without it and with "
            "checkpoint.resume.unfreeze: [PATTERN]",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_way_out(mistakes: Mistakes, text: str, said: str) -> None:
    assert mistakes(text) == [said]


def test_all_broken_rules_are_told_at_once(mistakes: Mistakes) -> None:
    text = "steps: 1\nmin_steps: 2\n" + ROWS + "model: {path: m, dtype: bfloat16}\nevaluation: {every_epochs: 1}\n"

    assert [line.split(": ")[1] for line in mistakes(text)[1:]] == [
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
        "steps: 3\nparallel: {recompute: {kind: full, use_reentrant: false}}\n",
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
