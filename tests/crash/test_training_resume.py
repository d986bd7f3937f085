"""A run that stopped and went on is the run that did not stop: bit for bit at the same number of ranks."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast.checkpoint.keep import find
from holdfast.metrics.sink import read_metrics
from tests.crash.runs import (
    log_of,
    run_each,
    run_with_slow_saves,
    saved_steps,
    state_differences,
    values_of,
)
from tests.training.cases import run

STEPS, STOP = 8, 3
RESIZES = [(2, 1), (2, 3), (2, 4), (1, 2)]
"""Numbers of ranks before and after a resume."""

OBSERVERS = """
import os, signal, threading

def terminates_at_three(event):
    if event.step == 3:
        os.kill(os.getpid(), signal.SIGTERM)

def asks_for_a_checkpoint_at_one(event):
    if event.step == 1:
        os.kill(os.getpid(), signal.SIGUSR1)

def adds_losses(event, state):
    state["losses"] = state.get("losses", []) + [event.metrics["loss"]]
    with open("DIRECTORY/told.txt", "a") as file:
        file.write(f"{event.step} {len(state['losses'])} {sum(state['losses']):.12f}\\n")

def knows_nothing_of_others(event, state):
    assert "losses" not in state

def evaluates_at_two_and_terminates_meanwhile(event):
    if event.step == 2:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return "evaluate"

def saves_at_five(event):
    return "save" if event.step == 5 else None
"""


@pytest.fixture(scope="module")
def straight(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of eight steps on two ranks that nothing happened to."""
    place = tmp_path_factory.mktemp("straight")
    pools(2).run(run, values_of(place, steps=STEPS))
    return place


@pytest.fixture(scope="module")
def stopped(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same run, ended after three steps; nobody goes on in it."""
    place = tmp_path_factory.mktemp("stopped")
    pools(2).run(run, values_of(place, steps=STOP))
    return place


def go_on(pools: Any, stopped: Path, place: Path, **sections: Any) -> Path:
    """Go on in a copy."""
    shutil.copytree(stopped, place, dirs_exist_ok=True)
    pools(2).run(run, values_of(place, steps=STEPS, **sections))
    return place


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, id="37-random state; 28-resume 2 to 2")])
def test_three_steps_a_resume_and_five_are_eight_steps_bit_for_bit(
    pools: Any, straight: Path, stopped: Path, tmp_path: Path, ranks: int
) -> None:
    resumed = go_on(pools, stopped, tmp_path)

    assert log_of(resumed) == log_of(straight)
    assert len(log_of(straight)) == STEPS
    assert state_differences(resumed, straight) == []


def test_dropout_draws_so_that_random_state_matters(pools: Any, straight: Path, tmp_path: Path) -> None:
    pools(2).run(run, values_of(tmp_path, steps=2, dropout=False))

    assert log_of(tmp_path)[0][1] != log_of(straight)[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "ranks"), [pytest.param(*pair, id="28-resume {} to {}".format(*pair)) for pair in RESIZES]
)
def test_another_number_of_ranks_sees_the_same_rows_and_the_same_losses(
    pools: Any, tmp_path: Path, before: int, ranks: int
) -> None:
    exact = {"dropout": False, "model": {"dtype": "float64"}}
    places = {name: tmp_path / name for name in ("straight", "resumed")}
    pools(before).run(
        run_each,
        [values_of(places["straight"], steps=STEPS, **exact), values_of(places["resumed"], steps=STOP, **exact)],
    )

    pools(ranks).run(run, values_of(places["resumed"], steps=STEPS, **exact))

    one, two = log_of(places["straight"]), log_of(places["resumed"])
    assert [(line[0], line[3:]) for line in one] == [(line[0], line[3:]) for line in two]
    assert [line[1] for line in two] == pytest.approx([line[1] for line in one], abs=1e-10)
    assert [line[2] for line in two] == pytest.approx([line[2] for line in one], abs=1e-9)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("before", "after"), [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((4, 2), (2, 1))], ids=["to none", "from none", "4 to 2"]
)
def test_a_run_goes_on_at_any_number_of_ranks_that_share_a_row(
    pools: Any, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    exact = {"dropout": False, "model": {"dtype": "float64"}}
    places = {name: tmp_path / name for name in ("straight", "resumed")}
    context = {"parallel": {"context": before[1]}}
    pools(1).run(run, values_of(places["straight"], steps=STEPS, **exact))
    pools(before[0]).run(run, values_of(places["resumed"], steps=STOP, **exact, **context))

    pools(after[0]).run(run, values_of(places["resumed"], steps=STEPS, **exact, parallel={"context": after[1]}))

    one, two = log_of(places["straight"]), log_of(places["resumed"])
    assert [(line[0], line[3:]) for line in one] == [(line[0], line[3:]) for line in two]
    assert [line[1] for line in two] == pytest.approx([line[1] for line in one], abs=1e-10)
    assert [line[2] for line in two] == pytest.approx([line[2] for line in one], abs=1e-9)


def test_the_log_of_a_run_that_was_set_back_is_the_straight_run_s(
    pools: Any, straight: Path, stopped: Path, tmp_path: Path
) -> None:
    """Steps 4 and 5 were made after the last checkpoint; a kill tore the line of the sixth."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "r" / "metrics.jsonl"
    with file.open("a") as lines:
        lines.write('{"step":4,"loss":99.0}\n{"step":5,"loss":98.0}\n{"step":6,"lo')

    pools(2).run(run, values_of(tmp_path, steps=STEPS))

    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("to", line.get("step")) for line in written] == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]
    assert written[5] == {"event": "rewind", "to": 3}
    assert log_of(tmp_path) == log_of(straight)


@pytest.mark.parametrize("ranks", [pytest.param(2, id="42-tied weights")])
def test_tied_weights_are_stored_once_and_named(stopped: Path, ranks: int) -> None:
    manifest = json.loads((stopped / "r" / "checkpoints" / "step-00000003" / "manifest.json").read_text())["manifest"]

    assert manifest["ties"] == {"model.embed_tokens.weight": ["lm_head.weight"]}
    assert "model.model.embed_tokens.weight" in manifest["tensors"]
    assert not [name for name in manifest["tensors"] if "lm_head" in name]


@pytest.fixture
def observed(tmp_path: Path) -> Path:
    (tmp_path / "watch.py").write_text(OBSERVERS.replace("DIRECTORY", str(tmp_path)))
    return tmp_path


@pytest.mark.slow
def test_signals_and_observers_save_and_the_same_command_goes_on(pools: Any, straight: Path, observed: Path) -> None:
    watch = [f"watch.py:{name}" for name in ("terminates_at_three", "asks_for_a_checkpoint_at_one", "saves_at_five")]
    values = values_of(observed, steps=STEPS, observers=watch, checkpoint={"every_steps": 100})

    first = pools(2).run(run, values, str(observed))
    after_first = saved_steps(observed)
    second = pools(2).run(run, values, str(observed))

    assert [(outcome.step, outcome.stopped) for outcome in first] == [(3, "stopped by SIGTERM")] * 2
    assert after_first == [1, 3]
    assert [(outcome.step, outcome.stopped) for outcome in second] == [(8, None)] * 2
    assert saved_steps(observed) == [1, 3, 5, 8]
    assert log_of(observed) == log_of(straight)


@pytest.mark.slow
def test_what_an_observer_keeps_comes_back_after_a_resume(pools: Any, observed: Path) -> None:
    watch = [f"watch.py:{name}" for name in ("adds_losses", "knows_nothing_of_others", "terminates_at_three")]
    values = values_of(observed, steps=STEPS, observers=watch)

    first = pools(2).run(run, values, str(observed))[0]
    pools(2).run(run, values, str(observed))

    losses = [line["loss"] for line in read_metrics(observed / "r" / "metrics.jsonl")]
    assert first.step == 3
    assert (observed / "told.txt").read_text().splitlines() == [
        f"{step} {step} {sum(losses[:step]):.12f}" for step in range(1, STEPS + 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, id="23-SIGTERM while a save is in flight")])
def test_sigterm_while_a_save_is_in_flight_finishes_it_and_saves_the_last_step_too(
    pools: Any, straight: Path, observed: Path, ranks: int
) -> None:
    values = values_of(observed, steps=STEPS, observers=["watch.py:terminates_at_three"])

    outcome = pools(ranks).run(run_with_slow_saves, values, str(observed), 1.0)[0]

    assert outcome.stopped == "stopped by SIGTERM"
    assert saved_steps(observed) == [2, 3]
    pools(ranks).run(run, values, str(observed))
    assert log_of(observed) == log_of(straight)


@pytest.mark.parametrize("ranks", [pytest.param(2, id="23-SIGTERM while an evaluation goes on")])
def test_sigterm_in_an_evaluation_leaves_it_and_saves_the_step_it_belongs_to(
    pools: Any, straight: Path, observed: Path, ranks: int
) -> None:
    held = {"synthetic": {"task": "sort", "rows": 20_000, "seed": 7}}
    values = values_of(
        observed,
        steps=STEPS,
        observers=["watch.py:evaluates_at_two_and_terminates_meanwhile"],
        evaluation={"sets": {"held": held}, "at_end": False},
        checkpoint={"every_steps": 100},
    )

    began = time.monotonic()
    outcomes = pools(ranks).run(run, values, str(observed))
    seconds = time.monotonic() - began

    assert [(outcome.step, outcome.stopped) for outcome in outcomes] == [(2, "stopped by SIGTERM")] * 2
    assert saved_steps(observed) == [2]
    last = read_metrics(observed / "r" / "metrics.jsonl")[-1]
    assert last["step"] == 2
    assert not [name for name in last if name.startswith("eval/")], "an evaluation that was left has no numbers"
    assert seconds < 30
    pools(ranks).run(run, values, str(observed))
    assert log_of(observed) == log_of(straight)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        pytest.param({"cpu_offload": True}, {"cpu_offload": True}, id="parameters in host memory"),
        pytest.param({"offload": ["activations", "optimizer"]}, {}, id="optimizer in host memory, then beside them"),
        pytest.param({"cpu_offload": True}, {"offload": ["optimizer"]}, id="parameters in host memory, then not"),
    ],
)
def test_an_offloaded_run_saves_resumes_and_exports_what_a_plain_one_does(
    pools: Any, straight: Path, tmp_path: Path, begins: dict[str, Any], goes_on: dict[str, Any]
) -> None:
    exported_at_end = {"checkpoint": {"export_at_end": True}}

    first = pools(2).run(run, values_of(tmp_path, steps=STOP, parallel=begins, **exported_at_end))[0]
    last = pools(2).run(run, values_of(tmp_path, steps=STEPS, parallel=goes_on, **exported_at_end))[0]

    assert (first.step, last.step) == (STOP, STEPS)
    assert log_of(tmp_path) == log_of(straight)
    assert state_differences(tmp_path, straight) == []
    stored = find.one(str(straight / "r"))
    exported = load_file(Path(last.export) / "model.safetensors")
    assert {f"model.{name}" for name in exported} == {name for name in stored.manifest.tensors if name[:6] == "model."}
    for name, tensor in exported.items():
        assert torch.equal(tensor, stored.read(f"model.{name}")), name


def test_the_clock_saves_what_was_learned(pools: Any, tmp_path: Path) -> None:
    outcome = pools(2).run(run, values_of(tmp_path, steps=1000, max_minutes=0.001))[0]

    assert outcome.stopped == "max_minutes=0.001 have passed"
    assert saved_steps(tmp_path)[-1] == outcome.step


def rows(path: Path, last: str) -> None:
    """Write rows, the last of which is given."""
    lines = [{"prompt": f"sort {number}=", "completion": str(number)} for number in range(40)]
    lines.append({"prompt": "sort 1=", "completion": last})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def tokenizer(path: Path, template: str) -> None:
    from holdfast.data.tasks.synthetic import character_tokenizer

    made: Any = character_tokenizer()
    made.chat_template = template
    made.save_pretrained(path)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["data", "files", "tokenizer"])
def test_changed_rows_files_and_tokenizers_are_refused_unless_declared(pools: Any, tmp_path: Path, kind: str) -> None:
    rows(tmp_path / "rows.jsonl", "1")
    tokenizer(tmp_path / "tokenizer", "{{ messages[0].content }}")
    (tmp_path / "watch.py").write_text("def looks(event):\n    return None\n")
    values = values_of(
        tmp_path, steps=2, observers=["watch.py:looks"], model={"tokenizer": str(tmp_path / "tokenizer")}
    )
    values["data"] = {"path": "rows.jsonl", "batch_size": 16, "max_length": 32}
    pools(2).run(run, values, str(tmp_path))
    match kind:
        case "data":
            rows(tmp_path / "rows.jsonl", "2")
        case "files":
            (tmp_path / "watch.py").write_text("def looks(event):\n    return []\n")
        case "tokenizer":
            tokenizer(tmp_path / "tokenizer", "{{ messages[0].content }}.")
    values["steps"] = 3

    errors = pools(2).errors(run, values, str(tmp_path))

    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointMismatch"
    assert f"was made with other things than this run has ({kind}: " in errors[0][1]
    assert f"checkpoint.resume.changed: [{kind}]" in errors[0][1]
    assert [line["step"] for line in read_metrics(tmp_path / "r" / "metrics.jsonl")] == [1, 2]
    values["checkpoint"] = values["checkpoint"] | {"resume": {"changed": [kind]}}
    assert pools(2).run(run, values, str(tmp_path))[0].step == 3


def test_a_rehearsed_run_is_bit_for_bit_one_that_was_not(pools: Any, straight: Path, tmp_path: Path) -> None:
    pools(2).run(run, values_of(tmp_path, steps=STEPS, checkpoint={"rehearsal": True}))

    assert log_of(tmp_path) == log_of(straight)
    assert state_differences(tmp_path, straight) == []


@pytest.mark.parametrize("save", [1, 2], ids="50-whole state of {} ranks on others".format)
def test_a_state_that_one_or_two_ranks_wrote_is_loaded_by_four(pools: Any, tmp_path: Path, save: int) -> None:
    from tests.checkpoint.cases import load_into_other, save_after

    path = str(tmp_path / "step-00000001")
    expected = pools(save).run(save_after, path, 1)[0]

    for found in pools(4).run(load_into_other, path):
        assert {name: value for name, value in found.items() if "extra" not in name} == expected
