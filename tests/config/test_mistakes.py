"""Every kind of mistake: its line in the file, what is wrong, and the key that was meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.config.load import load_config
from holdfast.config.verbs.training import SFTConfig
from holdfast.errors import ConfigError
from tests.config.conftest import WHOLE

Mistakes = Callable[..., list[str]]
ROOT_KEYS = (
    "run, seed, steps, epochs, min_steps, stop_when, max_minutes, limit_batches, overfit_batches, dry_run, "
    "determinism, observers, parallel, optim, checkpoint, metrics, profile, evaluation, launch, model, data, "
    "objective, neftune_alpha"
)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("optm: {}", "optm: unknown key; did you mean optim?"),
        ("evaluations: {}", "evaluations: unknown key; did you mean evaluation?"),
        ("optim: {learning_rat: 1}", "optim.learning_rat: unknown key; this section has lr, weight_decay, groups, "
                                     "no_decay, schedule, ema, clip_norm, max_nonfinite_steps, kind, betas, eps"),
        ("optim: {learning_rate: 1}", "optim.learning_rate: unknown key; it is called optim.lr here"),
        ("num_train_epochs: 3", "num_train_epochs: unknown key; it is called epochs here"),
        ("optim: {clipnorm: 1}", "optim.clipnorm: unknown key; did you mean clip_norm?"),
        ("metrics: {log_evry: 2}", "metrics.log_evry: unknown key; did you mean log_every?"),
        ("zzz: 1", f"zzz: unknown key; this section has {ROOT_KEYS}"),
        ("launch: {rank: 2}", "launch.rank: unknown key; did you mean ranks?"),
        ("evaluation: {sets: {a: {path: x, weigth: 1}}}", "evaluation.sets.a.weigth: unknown key; "
                                                          "did you mean weight?"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_the_one_that_was_meant(mistakes: Mistakes, line: str, said: str) -> None:
    assert mistakes(WHOLE + line) == [f"run.yaml:4: {said}"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lr: 1e-5", "lr: unknown key here; it belongs elsewhere: did you mean optim.lr?"),
        ("batch_size: 4", "batch_size: unknown key here; it belongs elsewhere: did you mean data.batch_size?"),
        ("optim: {seed: 4}", "optim.seed: unknown key here; it belongs elsewhere: did you mean data.seed or "
                             "data.synthetic.seed or seed?"),
        ("launch: {optim: {lr: 1}}", "launch.optim: unknown key here; it belongs elsewhere: did you mean optim?"),
        ("recompute: full", "recompute: unknown key here; it belongs elsewhere: did you mean parallel.recompute?"),
        ("optim.lr: 1e-5", "optim.lr: dots are for the command line; in a file write lr inside optim"),
        ("batchsize: 4", "batchsize: unknown key; did you mean data.batch_size?"),
    ],
)  # fmt: skip
def test_a_key_in_the_wrong_place_is_sent_to_the_right_one(mistakes: Mistakes, line: str, said: str) -> None:
    assert mistakes(WHOLE + line) == [f"run.yaml:4: {said}"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("seed: ten", "seed: 'ten' should be a whole number"),
        ("seed: 1.5", "seed: 1.5 should be a whole number"),
        ("seed: -1", "seed: -1 should be greater than or equal to 0"),
        ("seed: true", "seed: true should be a number"),
        ("seed: [1]", "seed: [1] should be a whole number"),
        ("seed:", "seed: None should be a whole number"),
        ("optim: {lr: fast}", "optim.lr: 'fast' should be a number"),
        ("optim: {lr: 0}", "optim.lr: 0 should be greater than 0"),
        ("optim: {lr: .inf}", "optim.lr: inf should be a finite number"),
        ("optim: {lr: true}", "optim.lr: true should be a number"),
        ("optim: {betas: [0.9]}", "optim.betas: [0.9] has too few values"),
        ("optim: {betas: [0.9, 1]}", "optim.betas.1: 1 should be less than 1"),
        ("seed: 9223372036854775808", "seed: 9223372036854775808 should be less than 9223372036854775808"),
        ("optim: {no_decay: norm}", "optim.no_decay: 'norm' should be a list, as in [a, b]"),
        ("optim: {no_decay: ['(']}", "optim.no_decay.0: '(' is not a regular expression: missing ), unterminated "
                                     "subpattern at position 0"),
        ("dry_run: maybe", "dry_run: 'maybe' should be true or false"),
        ("run: {dir: 5}", "run.dir: 5 should be text; put it in quotes"),
        ("run: {name: a/b}", "run.name: 'a/b' is to name a directory; use letters, digits, '.', '_' and '-', and "
                             "begin with a letter or digit"),
        ("run: {name: ..}", "run.name: '..' is to name a directory; use letters, digits, '.', '_' and '-', and "
                            "begin with a letter or digit"),
        ("observers: [watch.py]", "observers.0: 'watch.py' must name a function in a file, as in "
                                  "my_file.py:my_function"),
        ("launch: {ranks: two}", "launch.ranks: 'two' should be a whole number or 'auto'"),
        ("launch: {ranks: 0}", "launch.ranks: 0 should be greater than or equal to 1 or 'auto'"),
        ("parallel: {compile: hed}", "parallel.compile: 'hed' should be 'auto', 'blocks', 'off' or 'head'"),
        ("metrics: {sinks: [csv, csv]}", "metrics.sinks.1: csv is there already; every tracker has a name of its own"),
        ("checkpoint: {export_dtype: float64}", "checkpoint.export_dtype: 'float64' should be 'same', 'float32' or "
                                                "'bfloat16'"),
        ("launch: 3", "launch: this is a section with keys of its own, not the value 3"),
        ("launch: [3]", "launch: this is a section with keys of its own, not the value [3]"),
        ("optim: 3", "optim: this is a section with keys of its own, not the value 3"),
        ("optim:", "optim: this section is empty; remove it, or give it keys ({} is a section with "
                   "its defaults)"),
        ("evaluation: {sets: [a]}", "evaluation.sets: this is a section with keys of its own, not the value ['a']"),
        ("evaluation: {sets: {a: rows.jsonl}}", "evaluation.sets.a: this is a section with keys of its own, not the "
                                                "value 'rows.jsonl'; write a: {path: rows.jsonl}"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_shown_with_what_it_should_be(mistakes: Mistakes, line: str, said: str) -> None:
    assert mistakes(WHOLE + line) == [f"run.yaml:4: {said}"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("optim: adam", "optim: there is no kind 'adam'. Did you mean adamw? Kinds: adamw, adamw_bf16, "
                        "adamw_8bit, adamw_4bit, adamw_fp8, sgd, muon, path"),
        ("optim: {kind: lion}", "optim: there is no kind 'lion'. Kinds: adamw, adamw_bf16, "
                                "adamw_8bit, adamw_4bit, adamw_fp8, sgd, muon, path"),
        ("optim: {momentum: 0.9}", "optim.momentum: kind adamw has no such key; it belongs to kind sgd and muon"),
        ("optim: {kind: sgd, betas: [0.9, 0.9]}", "optim.betas: kind sgd has no such key; it belongs to kind adamw "
                                                  "and adamw_bf16 and adamw_8bit and adamw_4bit "
                                                  "and adamw_fp8 and muon"),
        ("optim: {schedule: inverse_sqrt}", "optim.schedule.timescale: it follows the warm-up, and there is none; set "
                                            "timescale, warmup_steps or warmup_ratio"),
        ("optim: {schedule: {kind: constant, final_ratio: 0.1}}", "optim.schedule.final_ratio: kind constant has no "
                                                                  "such key; it belongs to kind linear and cosine "
                                                                  "and cosine_with_restarts and polynomial and wsd "
                                                                  "and plateau"),
        ("optim: {kind: sgd, schedule: {kind: wsd, decay: 0.1}}", "optim.schedule.decay: unknown key; did you mean "
                                                                  "decay_ratio?"),
        ("objective: path", "objective.path: required, and missing"),
        ("objective: {kind: path, path: f.py:g, extra: 1}", "objective.extra: unknown key; this section has kind, "
                                                            "path, kwargs"),
        ("objective: {kind: path, path: 5}", "objective.path: 5 should be text; put it in quotes"),
        ("parallel: {recompute: {kind: every_k, k: 0}}", "parallel.recompute.k: 0 should be greater than or equal to "
                                                         "1"),
        ("parallel: {recompute: {kind: full, k: 3}}", "parallel.recompute.k: kind full has no such key; it belongs to "
                                                      "kind every_k"),
    ],
)  # fmt: skip
def test_alternatives_refuse_each_others_keys(mistakes: Mistakes, line: str, said: str) -> None:
    assert mistakes(WHOLE + line) == [f"run.yaml:4: {said}"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "parallel: {offload: [parameters]}",
            "run.yaml:4: parallel.offload: parameters in host memory are updated there, so gradients and optimizer "
            "state are too; add optimizer",
        ),
        (
            "parallel: {offload: [activations], recompute: selective}",
            "run.yaml:4: parallel.offload: activations with recompute: selective would stay on the device, since torch "
            "keeps the products of selective recomputation outside of autograd. Use recompute: full, every_k or none",
        ),
        (
            "parallel: {offload: [optimizer]}\noptim: adamw_8bit",
            "run.yaml:4: parallel.offload: optimizer without parameters goes with optim.kind: adamw, adamw_bf16 or "
            "sgd, not with adamw_8bit, whose state may depend on where parameters are. Name parameters too, or leave "
            "optimizer out",
        ),
        (
            "parallel: {offload: [optimizer]}\noptim: muon",
            "run.yaml:4: parallel.offload: optim.kind: muon gathers whole matrices, and host memory has no group to do "
            "so; choose one of the two",
        ),
    ],
)
def test_what_cannot_be_offloaded_together_is_refused_with_its_way_out(
    mistakes: Mistakes, lines: str, said: str
) -> None:
    assert mistakes(WHOLE + lines) == [said]


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(mistakes: Mistakes) -> None:
    text = """\
model:
  path: some-model
  atention: sdpa
data:
  sources:
    - {path: a.jsonl, wieght: 2}
    - {pth: b.jsonl}
  batch_size: 0
seed: 1
steps: many
seed: 2
optim: {kind: adm}
"""

    lines = mistakes(text, "launch.rnks=2", "nonsense")

    assert lines == [
        "run.yaml has 9 mistakes:",
        "run.yaml:3: model.atention: unknown key; did you mean attention?",
        "run.yaml:6: data.sources.0.wieght: unknown key; did you mean weight?",
        "run.yaml:7: data.sources.1.pth: unknown key; did you mean path?",
        "run.yaml:8: data.batch_size: 0 should be greater than or equal to 1",
        "run.yaml:10: steps: 'many' should be a whole number",
        "run.yaml:11: seed: set twice, first on line 9; keep one of them",
        "run.yaml:12: optim: there is no kind 'adm'. Did you mean adamw? Kinds: adamw, adamw_bf16, adamw_8bit, "
        "adamw_4bit, adamw_fp8, sgd, muon, path",
        "command line (launch.rnks=2): launch.rnks: unknown key; did you mean ranks?",
        "command line (nonsense): this is no override; write section.key=value, for example optim.lr=2e-6",
    ]


def test_a_section_that_is_missing_is_named(mistakes: Mistakes) -> None:
    assert mistakes("steps: 3\n") == [
        "run.yaml has 2 mistakes:",
        "run.yaml: model: required, and missing; for example model: {path: Qwen/Qwen3-0.6B}",
        "run.yaml: data: required, and missing; for example data: {path: rows.jsonl}",
    ]


def test_a_key_that_stands_twice_is_a_mistake_even_if_all_else_is_right(mistakes: Mistakes) -> None:
    assert mistakes(WHOLE + "steps: 4\n") == ["run.yaml:4: steps: set twice, first on line 1; keep one of them"]


def test_a_file_name_that_names_no_directory_asks_for_a_run_name(mistakes: Mistakes) -> None:
    assert mistakes(WHOLE, name="my run.yaml") == [
        "the name of my run.yaml: run.name: 'my run' is to name a directory; use letters, digits, '.', '_' and '-', "
        "and begin with a letter or digit"
    ]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no file .*gone\.yaml\. Give the path of a run's YAML file\."):
        load_config(tmp_path / "gone.yaml", [], SFTConfig)


def test_a_directory_or_a_binary_file_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\x00")

    for path in (tmp_path, tmp_path / "weights.bin"):
        with pytest.raises(ConfigError, match="cannot be read: "):
            load_config(path, [], SFTConfig)


def test_what_has_no_effect_is_refused(mistakes: Mistakes) -> None:
    text = "steps: 3\nmodel: {path: m}\ndata: {path: rows.jsonl, packing: wrapped, overlong: refuse}\n"

    assert mistakes(text) == [
        "run.yaml:3: data.overlong: refuse has no effect with packing: wrapped, where no row is too long; leave it out"
    ]


def test_rules_within_a_section_that_is_right_are_told_beside_values_that_are_wrong_elsewhere(
    mistakes: Mistakes,
) -> None:
    text = WHOLE + "optim: {lr: fast}\nevaluation: {sets: {validation: {path: a.jsonl}}}\n"

    lines = mistakes(text)

    assert lines[0] == "run.yaml has 2 mistakes:"
    assert lines[1] == "run.yaml:4: optim.lr: 'fast' should be a number"
    assert lines[2].startswith("run.yaml:5: evaluation.sets.validation: the name 'validation' belongs to")


def test_rules_that_ask_for_a_wrong_value_are_not_told(mistakes: Mistakes) -> None:
    """Without it no end would be set; whoever mends it has set one."""
    text = "steps: many\nmodel: {path: m}\ndata: {path: rows.jsonl}\n"

    assert mistakes(text) == ["run.yaml:1: steps: 'many' should be a whole number"]
