"""`holdfast dpo` as a user meets it: what it writes, how it goes on, what it refuses; and `holdfast.dpo`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import read_metrics
from tests.cli.fixtures import TINY, write_rows, write_run
from tests.cli.test_refusals import everything_in
from tests.cli.warm import Done, WarmPython
from tests.messages import Said, lacks

LOSS = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Hinge:
    margin: float

    def losses(self, pairs):
        return (self.margin - self.rewards(pairs.chosen) + self.rewards(pairs.rejected)).clamp(min=0)

    def rewards(self, answers):
        return answers.mean_logps

def hinge(margin):
    return Hinge(margin)
"""


KTO = {"preference": {"loss": "kto"}, "data": {"synthetic": {"task": "sort", "rows": 40}, "batch_size": 4}}


@pytest.fixture
def pairs(tmp_path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Return a run on preferences that works on two ranks, with its rows in the same directory."""
    rows = [{"prompt": f"add {n}=", "chosen": str(n), "rejected": "no"} for n in range(12)]
    write_rows(tmp_path / "rows.jsonl", rows)
    return tree | {"steps": 4, "preference": {"loss": "dpo"}, "optim": {"lr": 0.01}}


def dpo(warm: WarmPython, place: Path, tree: dict[str, Any], *overrides: str) -> Done:
    write_run(place / "run.yaml", tree)
    return warm.run("-m", "holdfast.cli.main", "dpo", "run.yaml", *overrides, cwd=place)


def steps_of(place: Path, name: str = "run") -> list[dict[str, Any]]:
    return [line for line in read_metrics(place / "runs" / name / "metrics.jsonl") if "loss" in line]


def test_a_run_leaves_metrics_completions_and_a_model(warm: WarmPython, tmp_path: Path, pairs: dict[str, Any]) -> None:
    evaluation = {"sets": {"held": {"path": "rows.jsonl"}}, "completions": {"samples": 5, "max_new_tokens": 4}}

    done = dpo(warm, tmp_path, pairs | {"evaluation": evaluation})

    assert done.code == 0, done.err
    lines = steps_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert (lines[0]["rewards/margins"], lines[0]["loss"]) == (0.0, 0.6931471805599453)
    assert lines[-1]["loss"] < 0.69
    expected = {
        "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
        "logps/rejected", "nll_loss", "grad_norm", "timing/reference",
    }  # fmt: skip
    assert expected <= lines[0].keys()
    last = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")[-1]
    assert {"eval/held/loss", "eval/held/rewards/accuracies", "eval/held/completions/accuracy"} <= last.keys()
    completions = (tmp_path / "runs" / "run" / "completions" / "step-00000004.held.jsonl").read_text().splitlines()
    assert [json.loads(line)["reference"] for line in completions] == ["0", "1", "2", "3", "4"]
    assert (tmp_path / "runs" / "run" / "exports" / "final" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"reference": {"precompute": True}}, marks=pytest.mark.slow, id="dpo, reference asked before"),
        pytest.param(KTO, id="kto, reference beside the policy"),
    ],
)
def test_a_killed_run_that_goes_on_is_identical(
    warm: WarmPython, tmp_path: Path, pairs: dict[str, Any], sections: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", pairs | sections)

    done = warm.run("-m", "holdfast.cli.main", "prove", "run.yaml", "--steps", "5", "--kill-at", "4", cwd=tmp_path)

    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[-1] == "identical"


@pytest.mark.slow  # tests/distributed and tests/crash do it without the command line
def test_a_run_goes_on_at_another_number_of_ranks(warm: WarmPython, tmp_path: Path, pairs: dict[str, Any]) -> None:
    straight = pairs | {"model": pairs["model"] | {"dtype": "float64"}, "optim": {"kind": "sgd", "lr": 0.1}}
    straight["optim"]["schedule"] = "constant"
    dpo(warm, tmp_path, straight, "run.name=straight")
    dpo(warm, tmp_path, straight, "steps=2")

    done = dpo(warm, tmp_path, straight, "launch.ranks=1")

    assert done.code == 0, done.err
    for name in ("loss", "rewards/margins", "grad_norm"):
        expected = [line[name] for line in steps_of(tmp_path, "straight")]
        assert [line[name] for line in steps_of(tmp_path)] == pytest.approx(expected, rel=1e-9, abs=1e-12), name


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_loss_or_another_reference(
    warm: WarmPython, tmp_path: Path, pairs: dict[str, Any], said: Said
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from holdfast.data.tasks.synthetic import character_tokenizer

    def save(seed: int) -> None:
        import torch

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY)).save_pretrained(tmp_path / "model")
        character_tokenizer().save_pretrained(tmp_path / "model")

    save(0)
    stored = pairs | {"model": {"path": "model"}}
    assert dpo(warm, tmp_path, stored, "steps=2").code == 0

    other_loss = dpo(warm, tmp_path, stored, "preference.loss=ipo")
    save(1)
    other_model = dpo(warm, tmp_path, stored)

    assert (other_loss.code, other_model.code) == (2, 2)
    assert lacks(other_loss.err, "step-00000002 objective: preference") == []
    said(other_loss.err.strip())
    assert lacks(other_model.err, "step-00000002 model: model.path") == []
    said(other_model.err.strip())


@pytest.mark.slow
def test_a_loss_of_the_user_s_own_trains(warm: WarmPython, tmp_path: Path, pairs: dict[str, Any]) -> None:
    (tmp_path / "loss.py").write_text(LOSS)
    section = {"kind": "path", "path": "loss.py:hinge", "kwargs": {"margin": 1.0}, "needs_reference": False}

    done = dpo(warm, tmp_path, pairs | {"preference": {"loss": section}})
    wrong = dpo(warm, tmp_path, pairs | {"preference": {"loss": section | {"kwargs": {}}}}, "run.name=wrong")

    assert done.code == 0, done.err
    assert "reference policy" not in done.out
    lines = steps_of(tmp_path)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[0]["loss"] == pytest.approx(1 - lines[0]["rewards/margins"], rel=1e-6)
    assert wrong.code == 2
    assert lacks(wrong.err, "preference.loss.path loss.py:hinge TypeError 'margin'") == []


def rows_of(**changed: Any) -> Any:
    """Return what makes every row have other columns."""

    def spoil(folder: Path, tree: dict[str, Any]) -> None:
        row = {"prompt": "add 1=", "chosen": "2", "rejected": "3"} | changed
        kept = {name: value for name, value in row.items() if value is not ...}
        write_rows(folder / "rows.jsonl", [kept] * 12)

    return spoil


def long_prompts(folder: Path, tree: dict[str, Any]) -> None:
    rows_of(prompt="1" * 40)(folder, tree)


def long_prompts_refused(folder: Path, tree: dict[str, Any]) -> None:
    long_prompts(folder, tree)
    tree["data"]["overlong"] = "refuse"


def labels_missing(folder: Path, tree: dict[str, Any]) -> None:
    rows_of(completion="2", chosen=..., rejected=...)(folder, tree)
    tree["preference"] = {"loss": "kto"}


def foreign_cache(folder: Path, tree: dict[str, Any]) -> None:
    (folder / "said").write_text("something else")
    tree["reference"] = {"precompute": True, "cache": "said"}


def bad_row_before_the_pass(folder: Path, tree: dict[str, Any]) -> None:
    rows_of(rejected=...)(folder, tree)
    tree["reference"] = {"precompute": True}


def shared_but_padded(folder: Path, tree: dict[str, Any]) -> None:
    tree["data"] |= {"packing": "none", "shared_prompt": "on"}


BAD: dict[str, tuple[Any, str]] = {
    "answers alike": (rows_of(rejected="2"), "chosen rejected"),
    "one answer": (rows_of(rejected=...), "'rejected' prompt chosen"),
    "empty answer": (rows_of(chosen=""), "chosen"),
    "long prompts": (long_prompts, "rows overlong_dropped:"),
    "long prompts refused": (long_prompts_refused, "42 data.max_length=32"),
    "no labels": (labels_missing, "'label' kto prompt completion"),
    "foreign cache": (foreign_cache, "said"),
    "one answer, reference asked before": (bad_row_before_the_pass, "'rejected' prompt chosen"),
    "shared but padded": (shared_but_padded, "data.shared_prompt llama"),
}
"""What makes a run bad, and the words that its message has to name."""


@pytest.mark.parametrize("case", BAD)
def test_a_bad_input_is_one_paragraph_and_leaves_nothing(
    warm: WarmPython, tmp_path: Path, pairs: dict[str, Any], case: str, said: Said
) -> None:
    spoil, named = BAD[case]
    spoil(tmp_path, pairs)
    write_run(tmp_path / "run.yaml", pairs)
    before = everything_in(tmp_path)

    done = warm.run("-m", "holdfast.cli.main", "dpo", "run.yaml", cwd=tmp_path)

    assert done.code == 2, done
    assert "Traceback" not in done.err + done.out
    assert lacks(done.err.strip().splitlines()[0], named) == []
    assert "\n\n" not in done.err.strip()
    assert everything_in(tmp_path) == before
    cut = re.sub(r" \(Error .*?\)", "", done.err.strip())  # safetensors' own words
    said(re.sub(r"\brow \d+", "row N", cut))  # of the rank that met it first


def test_a_reference_for_a_loss_without_one_is_refused(
    warm: WarmPython, tmp_path: Path, pairs: dict[str, Any], said: Said
) -> None:
    done = dpo(warm, tmp_path, pairs | {"preference": {"loss": "orpo"}, "reference": {"kind": "sharded"}})

    assert done.code == 2
    assert lacks(done.err, "reference.kind preference.loss orpo") == []
    said(done.err.strip())


def test_rows_that_prefer_nothing_can_be_dropped_and_are_counted(
    warm: WarmPython, tmp_path: Path, pairs: dict[str, Any]
) -> None:
    rows = [{"prompt": f"add {n}=", "chosen": str(n), "rejected": str(n + n % 2)} for n in range(12)]
    write_rows(tmp_path / "rows.jsonl", rows)

    done = dpo(warm, tmp_path, pairs | {"data": pairs["data"] | {"unusable": "drop", "shuffle": False}}, "steps=1")

    assert done.code == 0, done.err
    assert steps_of(tmp_path)[0]["data/alike_dropped"] == 4.0
    assert steps_of(tmp_path)[0]["data/rows"] == 4.0


SCRIPT = """
import json, sys
import holdfast

tree, rows = json.loads(sys.argv[1]), json.loads(sys.argv[2])
outcome = holdfast.dpo(tree, rows=rows)
print(json.dumps({"step": outcome.step, "loss": outcome.metrics["loss"], "margin": outcome.metrics["rewards/margins"]}))
"""


def test_the_call_from_python_is_the_command(warm: WarmPython, tmp_path: Path, pairs: dict[str, Any]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert dpo(warm, tmp_path, pairs, "launch.ranks=1").code == 0
    live = pairs | {"run": {"name": "live"}, "data": pairs["data"] | {"path": None}, "launch": {"device": "cpu"}}

    done = warm.run("script.py", json.dumps(live), json.dumps(rows), cwd=tmp_path)

    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    expected = steps_of(tmp_path)[-1]
    assert found == {"step": 4, "loss": expected["loss"], "margin": expected["rewards/margins"]}
