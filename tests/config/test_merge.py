"""Several files are one configuration: later ones win key by key, and a mistake names the file that holds the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import load_config
from holdfast.config.sections.optim import AdamWConfig, MuonConfig, SGDConfig
from holdfast.config.verbs.roots import load_run
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.errors import ConfigError
from tests.messages import Said, mistakes_of, places

BASE = """\
steps: 3
model: {path: some-model}
data: {path: rows.jsonl, batch_size: 4}
"""
Files = Callable[..., list[Path]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Return a function that writes base.yaml and further files."""

    def write(**texts: str) -> list[Path]:
        paths = [tmp_path / f"{name}.yaml" for name in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text)
        return paths

    return write


def load(paths: list[Path], *overrides: str) -> SFTConfig:
    first, *more = paths
    return load_config(first, [*map(str, more), *overrides], SFTConfig).config


Mistaken = Callable[..., list[str]]


@pytest.fixture
def mistakes(tmp_path: Path, said: Said) -> Mistaken:
    """Return a function (files, overrides) -> the places of the mistakes of the error, which is in the snapshot."""

    def of_files(paths: list[Path], *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as raised:
            load(paths, *overrides)
        said(str(raised.value))
        return places(mistakes_of(raised.value, tmp_path))

    return of_files


def test_later_files_win_key_by_key_and_the_command_line_over_all(files: Files) -> None:
    paths = files(
        base=BASE + "optim: {lr: 1e-3, weight_decay: 0.1}\nseed: 1\n",
        more="data: {batch_size: 8, max_length: 64}\noptim: {lr: 2e-3}\nseed: 2\n",
        last="optim: {lr: 3e-3}\n",
    )

    config = load(paths, "seed=4")

    assert (config.data.path, config.data.batch_size, config.data.max_length) == ("rows.jsonl", 8, 64)
    assert (config.optim.lr, config.optim.weight_decay, config.seed) == (3e-3, 0.1, 4)
    assert config.run.name == "base-more-last"


@pytest.mark.parametrize("early", [True, False])
def test_values_of_the_command_line_win_wherever_the_files_stand(files: Files, early: bool) -> None:
    base, more = files(base=BASE, more="seed: 2\n")

    words = ["seed=3", str(more)] if early else [str(more), "seed=3"]

    assert load_config(base, words, SFTConfig).config.seed == 3


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        ("{kind: sgd, lr: 0.5, momentum: 0.9}", "{lr: 0.1}", {"kind": "sgd", "lr": 0.1, "momentum": 0.9}),
        ("{kind: sgd, lr: 0.5, momentum: 0.9}", "{kind: sgd, lr: 0.1}", {"kind": "sgd", "lr": 0.1, "momentum": 0.9}),
        ("{kind: sgd, lr: 0.5, momentum: 0.9}", "sgd", {"kind": "sgd", "lr": 0.5, "momentum": 0.9}),
        ("{kind: sgd, lr: 0.5, momentum: 0.9}", "{kind: adamw}", {"kind": "adamw"}),
        ("{kind: sgd, lr: 0.5, momentum: 0.9}", "muon", {"kind": "muon"}),
        ("sgd", "{momentum: 0.9}", {"kind": "sgd", "momentum": 0.9}),
        ("{lr: 0.5}", "{kind: adamw, eps: 1e-6}", {"kind": "adamw", "lr": 0.5, "eps": 1e-6}),
        ("{lr: 0.5}", "{kind: sgd}", {"kind": "sgd"}),
    ],
)
def test_an_alternative_is_merged_with_its_own_kind_and_replaced_by_another(
    files: Files, before: str, after: str, optimizer: dict[str, Any]
) -> None:
    kinds = {"adamw": AdamWConfig, "sgd": SGDConfig, "muon": MuonConfig}

    config = load(files(base=f"{BASE}optim: {before}\n", more=f"optim: {after}\n"))

    assert config.optim == kinds[optimizer["kind"]].model_validate(optimizer)


def test_lists_are_replaced_and_sets_are_merged_by_name(files: Files) -> None:
    paths = files(
        base=BASE + "metrics: {sinks: [csv, tensorboard]}\nevaluation: {sets: {a: {path: a}, b: {path: b}}}\n",
        more="metrics: {sinks: [tensorboard]}\nevaluation: {sets: {b: {path: c}}}\n",
    )

    config = load(paths)

    assert [sink.kind for sink in config.metrics.sinks] == ["tensorboard"]
    assert {name: source.path for name, source in config.evaluation.sets.items()} == {"a": "a", "b": "c"}


def test_null_takes_back_what_an_earlier_file_says(files: Files) -> None:
    paths = files(
        base=BASE + "optim: {kind: sgd, lr: 0.5}\nmax_minutes: 5\nstop_when: {metric: loss, mode: min}\n",
        more="optim:\nmax_minutes:\nstop_when:\n",
    )

    config = load(paths)

    assert (config.optim, config.max_minutes, config.stop_when) == (AdamWConfig(), None, None)


def test_a_mistake_names_the_file_and_the_line_of_its_key(files: Files, mistakes: Mistaken) -> None:
    paths = files(
        base=BASE + "optim: {lr: fast, weight_decay: 0.1}\nsed: 1\nlaunch: {ranks: 0}\n",
        more="\nlaunch:\n  device: cpu\n  rank: 2\noptim:\n  weight_decay: heavy\nseed: 1\nseed: 2\n",
    )

    assert mistakes(paths, "steps=many") == [
        "base.yaml:4: optim.lr",
        "base.yaml:5: sed",
        "base.yaml:6: launch.ranks",
        "more.yaml:4: launch.rank",
        "more.yaml:6: optim.weight_decay",
        "more.yaml:8: seed",
        "command line (steps=many): steps",
    ]


def test_a_mistake_in_a_replaced_section_is_the_later_files(files: Files, mistakes: Mistaken) -> None:
    paths = files(
        base=BASE + "optim:\n  kind: sgd\n  momentum: 0.9\n", more="\noptim:\n  kind: adamw\n  momentum: 0.5\n"
    )

    assert mistakes(paths) == ["more.yaml:4: optim.momentum"]


def test_a_section_that_a_later_file_takes_away_is_missing_there(files: Files, mistakes: Mistaken) -> None:
    paths = files(base=BASE, more="\ndata: null\n")

    assert mistakes(paths) == ["more.yaml:2: data"]


def test_a_file_that_is_not_there_is_named(files: Files) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        load([*files(base=BASE), Path("gone.yaml")])


def test_all_files_say_which_command_the_run_is_for(files: Files) -> None:
    base, more = files(base=BASE, more="preference: {loss: ipo}\n")

    config: TrainingConfig = load_run(base, [str(more)]).config

    assert config.verb == "dpo"
