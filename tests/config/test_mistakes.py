"""Every kind of mistake: its line in the file, what is wrong, and the key that was meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.config.load import load_config
from holdfast.config.verbs.training import SFTConfig
from holdfast.errors import ConfigError
from tests.config.conftest import WHOLE, Mistakes
from tests.messages import assert_only, places

ROOT_KEYS = (
    "run, seed, steps, epochs, min_steps, stop_when, max_minutes, limit_batches, overfit_batches, dry_run, "
    "determinism, observers, parallel, optim, checkpoint, metrics, profile, evaluation, launch, model, data, "
    "objective, neftune_alpha"
)


@pytest.mark.parametrize(
    ("line", "at", "named"),
    [
        ("optm: {}", "optm", "optim"),
        ("evaluations: {}", "evaluations", "evaluation"),
        ("optim: {learning_rat: 1}", "optim.learning_rat", "weight_decay no_decay clip_norm"),
        ("optim: {learning_rate: 1}", "optim.learning_rate", "optim.lr"),
        ("num_train_epochs: 3", "num_train_epochs", "epochs"),
        ("optim: {clipnorm: 1}", "optim.clipnorm", "clip_norm"),
        ("metrics: {log_evry: 2}", "metrics.log_evry", "log_every"),
        pytest.param("zzz: 1", "zzz", ROOT_KEYS, id="zzz"),
        ("launch: {rank: 2}", "launch.rank", "ranks"),
        ("evaluation: {sets: {a: {path: x, weigth: 1}}}", "evaluation.sets.a.weigth", "weight"),
    ],
)
def test_an_unknown_key_is_named_with_the_one_that_was_meant(
    mistakes: Mistakes, line: str, at: str, named: str
) -> None:
    assert_only(mistakes(WHOLE + line), f"run.yaml:4: {at}", named)


@pytest.mark.parametrize(
    ("line", "at", "named"),
    [
        ("lr: 1e-5", "lr", "optim.lr"),
        ("batch_size: 4", "batch_size", "data.batch_size"),
        ("optim: {seed: 4}", "optim.seed", "data.seed data.synthetic.seed"),
        ("launch: {optim: {lr: 1}}", "launch.optim", "optim"),
        ("recompute: full", "recompute", "parallel.recompute"),
        ("optim.lr: 1e-5", "optim.lr", ""),
        ("batchsize: 4", "batchsize", "data.batch_size"),
    ],
)
def test_a_key_in_the_wrong_place_is_sent_to_the_right_one(mistakes: Mistakes, line: str, at: str, named: str) -> None:
    assert_only(mistakes(WHOLE + line), f"run.yaml:4: {at}", named)


@pytest.mark.parametrize(
    ("line", "at", "named"),
    [
        ("seed: ten", "seed", "'ten'"),
        ("seed: 1.5", "seed", "1.5"),
        ("seed: -1", "seed", "-1 0"),
        ("seed: true", "seed", "true"),
        ("seed: [1]", "seed", "[1]"),
        ("seed:", "seed", "None"),
        ("optim: {lr: fast}", "optim.lr", "'fast'"),
        ("optim: {lr: 0}", "optim.lr", "0"),
        ("optim: {lr: .inf}", "optim.lr", "inf"),
        ("optim: {lr: true}", "optim.lr", "true"),
        ("optim: {betas: [0.9]}", "optim.betas", "0 9"),
        ("optim: {betas: [0.9, 1]}", "optim.betas.1", "1"),
        ("seed: 9223372036854775808", "seed", "9223372036854775808"),
        ("optim: {no_decay: norm}", "optim.no_decay", "'norm'"),
        ("optim: {no_decay: ['(']}", "optim.no_decay.0", "'(' 0"),
        ("dry_run: maybe", "dry_run", "'maybe'"),
        ("run: {dir: 5}", "run.dir", "5"),
        ("run: {name: a/b}", "run.name", "'a/b' '.' '_'"),
        ("run: {name: ..}", "run.name", "'..' '.' '_'"),
        ("observers: [watch.py]", "observers.0", "'watch.py' my_file.py my_function"),
        ("launch: {ranks: two}", "launch.ranks", "'two' 'auto'"),
        ("launch: {ranks: 0}", "launch.ranks", "0 1 'auto'"),
        ("parallel: {compile: hed}", "parallel.compile", "'hed' 'auto' 'blocks'"),
        ("metrics: {sinks: [csv, csv]}", "metrics.sinks.1", ""),
        ("checkpoint: {export_dtype: float64}", "checkpoint.export_dtype", "'float64' 'same' 'float32'"),
        ("launch: 3", "launch", "3"),
        ("launch: [3]", "launch", "3"),
        ("optim: 3", "optim", "3"),
        ("optim:", "optim", ""),
        ("evaluation: {sets: [a]}", "evaluation.sets", "'a'"),
        ("evaluation: {sets: {a: rows.jsonl}}", "evaluation.sets.a", "'rows.jsonl'"),
    ],
)
def test_a_wrong_value_is_shown_with_what_it_should_be(mistakes: Mistakes, line: str, at: str, named: str) -> None:
    assert_only(mistakes(WHOLE + line), f"run.yaml:4: {at}", named)


@pytest.mark.parametrize(
    ("line", "at", "named"),
    [
        ("optim: adam", "optim", "'adam' adamw_bf16 adamw_8bit"),
        ("optim: {kind: lion}", "optim", "'lion' adamw_bf16 adamw_8bit"),
        ("optim: adamw_4bit", "optim", "'adamw_4bit' adamw_8bit checkpoint.init_from"),
        ("optim: {kind: adamw_fp8, lr: 0.1}", "optim", "'adamw_fp8' adamw_8bit checkpoint.init_from"),
        ("optim: adamw_hf", "optim", "'adamw_hf' adamw;"),
        ("optim: {momentum: 0.9}", "optim.momentum", ""),
        ("optim: {kind: sgd, betas: [0.9, 0.9]}", "optim.betas", "adamw_bf16 adamw_8bit"),
        ("optim: {schedule: inverse_sqrt}", "optim.schedule.timescale", "warmup_steps warmup_ratio"),
        ("optim: {schedule: {kind: constant, final_ratio: 0.1}}", "optim.schedule.final_ratio", "cosine_with_restarts"),
        ("optim: {kind: sgd, schedule: {kind: wsd, decay: 0.1}}", "optim.schedule.decay", "decay_ratio"),
        ("objective: path", "objective.path", ""),
        ("objective: {kind: path, path: f.py:g, extra: 1}", "objective.extra", ""),
        ("objective: {kind: path, path: 5}", "objective.path", "5"),
        ("optim: {kind: path, path: my_optimizer.py}", "optim.path", "'my_optimizer.py' file.py:MyOptimizer"),
        ("parallel: {recompute: {kind: every_k, k: 0}}", "parallel.recompute.k", "0 1"),
        ("parallel: {recompute: {kind: full, k: 3}}", "parallel.recompute.k", "every_k"),
    ],
)
def test_alternatives_refuse_each_others_keys(mistakes: Mistakes, line: str, at: str, named: str) -> None:
    assert_only(mistakes(WHOLE + line), f"run.yaml:4: {at}", named)


@pytest.mark.parametrize(
    ("lines", "at", "named"),
    [
        ("parallel: {offload: [parameters]}", "run.yaml:4: parallel.offload", ""),
        ("parallel: {offload: [activations], recompute: selective}", "run.yaml:4: parallel.offload", "every_k"),
        (
            "parallel: {offload: [optimizer]}\noptim: adamw_8bit",
            "run.yaml:4: parallel.offload",
            "optim.kind adamw_bf16 adamw_8bit",
        ),
        ("parallel: {offload: [optimizer]}\noptim: muon", "run.yaml:4: parallel.offload", "optim.kind"),
    ],
)
def test_what_cannot_be_offloaded_together_is_refused_with_its_way_out(
    mistakes: Mistakes, lines: str, at: str, named: str
) -> None:
    assert_only(mistakes(WHOLE + lines), at, named)


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

    assert places(mistakes(text, "launch.rnks=2", "nonsense")) == [
        "run.yaml:3: model.atention",
        "run.yaml:6: data.sources.0.wieght",
        "run.yaml:7: data.sources.1.pth",
        "run.yaml:8: data.batch_size",
        "run.yaml:10: steps",
        "run.yaml:11: seed",
        "run.yaml:12: optim",
        "command line (launch.rnks=2): launch.rnks",
        "command line (nonsense)",
    ]


def test_a_section_that_is_missing_is_named(mistakes: Mistakes) -> None:
    assert places(mistakes("steps: 3\n")) == [
        "run.yaml: model",
        "run.yaml: data",
    ]


def test_a_key_that_stands_twice_is_a_mistake_even_if_all_else_is_right(mistakes: Mistakes) -> None:
    assert places(mistakes(WHOLE + "steps: 4\n")) == ["run.yaml:4: steps"]


def test_a_file_name_that_names_no_directory_asks_for_a_run_name(mistakes: Mistakes) -> None:
    assert places(mistakes(WHOLE, name="my run.yaml")) == ["the name of my run.yaml: run.name"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        load_config(tmp_path / "gone.yaml", [], SFTConfig)


def test_a_directory_or_a_binary_file_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\x00")

    for path in (tmp_path, tmp_path / "weights.bin"):
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            load_config(path, [], SFTConfig)


def test_what_has_no_effect_is_refused(mistakes: Mistakes) -> None:
    text = "steps: 3\nmodel: {path: m}\ndata: {path: rows.jsonl, packing: wrapped, overlong: refuse}\n"

    assert places(mistakes(text)) == ["run.yaml:3: data.overlong"]


def test_rules_within_a_section_that_is_right_are_told_beside_values_that_are_wrong_elsewhere(
    mistakes: Mistakes,
) -> None:
    text = WHOLE + "optim: {lr: fast}\nevaluation: {sets: {validation: {path: a.jsonl}}}\n"

    assert places(mistakes(text)) == ["run.yaml:4: optim.lr", "run.yaml:5: evaluation.sets.validation"]


def test_rules_that_ask_for_a_wrong_value_are_not_told(mistakes: Mistakes) -> None:
    """Without it no end would be set; whoever mends it has set one."""
    text = "steps: many\nmodel: {path: m}\ndata: {path: rows.jsonl}\n"

    assert places(mistakes(text)) == ["run.yaml:1: steps"]
