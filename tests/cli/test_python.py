"""`holdfast.sft` from Python: the same tree with live objects, alone and as one rank of many."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast
from holdfast.api import GIVEN
from holdfast.errors import ConfigError
from tests.cli.fixtures import TINY, write_run
from tests.cli.screens import numbers
from tests.cli.warm import Done, WarmPython, run
from tests.messages import Said, lacks

SCRIPT = Path(__file__).parent / "live_script.py"
MANY_CALLS = Path(__file__).parent / "many_calls_script.py"


def settings(name: str, **sections: Any) -> dict[str, Any]:
    data = {"batch_size": 4, "max_length": 32, "tokens_per_micro_batch": 64}
    return {"steps": 3, "run": {"name": name}, "data": data, "launch": {"device": "cpu"}, "model": {"dtype": "float64"},
            "optim": {"kind": "sgd", "lr": 0.1}} | sections  # fmt: skip


def reported(done: Done) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    # Ranks share the output, and two of them may write into one line.
    parts = done.out.split("said {")[1:]
    return sorted(
        (json.JSONDecoder().raw_decode("{" + part)[0] for part in parts), key=lambda found: str(found["rank"])
    )


def live(tree: dict[str, Any]) -> list[str]:
    return [str(SCRIPT), json.dumps(TINY), json.dumps(tree)]


@pytest.mark.slow
def test_live_rows_and_a_live_model_train_alone_and_under_torchrun_to_the_same_numbers(
    warm: WarmPython, tmp_path: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]

    alone = reported(warm.run(*live(settings("alone")), cwd=tmp_path))
    ranks = reported(run([*torchrun, warm.program, *live(settings("ranks"))], cwd=tmp_path))

    assert [found["rank"] for found in (*alone, *ranks)] == [None, "0", "1"]
    assert all(found["untouched"] and found["step"] == 3 and found["stopped"] is None for found in (*alone, *ranks))
    assert [found["seen"] for found in (*alone, *ranks)] == [[1, 2, 3], [1, 2, 3], []]
    assert [found["loss"] for found in ranks] == pytest.approx([alone[0]["loss"]] * 2, rel=1e-10)
    assert ranks[0]["export"] == "runs/ranks/exports/final"
    recorded = yaml.safe_load((tmp_path / "runs" / "alone" / "config.resolved.yaml").read_text())
    assert recorded["data"]["path"] == recorded["model"]["path"] == recorded["model"]["tokenizer"] == GIVEN
    assert exported(tmp_path / "runs" / "ranks") == exported(tmp_path / "runs" / "alone")


def exported(run_directory: Path) -> dict[str, list[float]]:
    from safetensors.torch import load_file

    tensors = load_file(run_directory / "exports" / "final" / "model.safetensors")
    return {name: [round(value, 9) for value in tensor.flatten().tolist()] for name, tensor in tensors.items()}


def test_live_objects_take_the_place_of_what_a_yaml_file_names(warm: WarmPython, tmp_path: Path) -> None:
    """Of the file everything else holds, and its name is the run's."""
    tree = settings("x", data={"synthetic": {"task": "sort"}, "batch_size": 6, "max_length": 32})
    del tree["run"]
    tree["model"] = {"config": TINY, "tokenizer": "gone"}
    write_run(tmp_path / "from-file.yaml", tree)

    found = reported(warm.run(SCRIPT, json.dumps(TINY), json.dumps("from-file.yaml"), cwd=tmp_path))[0]

    assert found["directory"] == "runs/from-file"
    recorded = yaml.safe_load((tmp_path / "runs" / "from-file" / "config.resolved.yaml").read_text())
    assert recorded["data"]["batch_size"] == 6
    assert (recorded["data"]["synthetic"], recorded["model"]["config"]) == (None, None)


def test_a_python_call_is_one_process_and_says_how_to_have_more(said: Said) -> None:
    with pytest.raises(ConfigError) as raised:
        holdfast.sft(settings("x", launch={"ranks": 2}), rows=[{"text": "a"}], model=object(), tokenizer=object())

    assert lacks(str(raised.value), "launch.ranks=2 `torchrun --nproc-per-node 2 `holdfast sft RUN.yaml`") == []
    said(str(raised.value))


def test_a_live_model_without_a_tokenizer_is_refused(said: Said) -> None:
    with pytest.raises(ConfigError, match=r" tokenizer=.* model\.tokenizer") as raised:
        holdfast.sft(settings("x"), rows=[{"text": "a"}], model=object())

    said(str(raised.value))


def test_mistakes_in_a_tree_from_python_are_told_like_those_of_a_file(said: Said) -> None:
    with pytest.raises(ConfigError) as raised:
        holdfast.sft({"stepz": 3, "model": {"path": "m"}, "data": {"batch_size": 0}}, rows=[{"text": "a"}])

    counted, *mistakes = str(raised.value).splitlines()
    assert numbers(counted) == [2]
    assert [line.split(": ")[:2] for line in mistakes] == [["config", "data.batch_size"], ["config", "stepz"]]
    assert numbers(mistakes[0]) == [0, 1]
    assert "steps" in mistakes[1]
    said(str(raised.value))


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_ten_calls_of_one_process_do_not_meet_what_earlier_ones_left(
    warm: WarmPython, tmp_path: Path, ranks: int
) -> None:
    """Two of them are refused and one fails in its first step; those after them work."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", ranks]
    command = [warm.program, MANY_CALLS, json.dumps(TINY)]

    found = reported(run(command if ranks == 1 else [*torchrun, *command], cwd=tmp_path, timeout_seconds=300))

    ends = {rank: [each["how"] for each in found if each["rank"] == rank] for rank in range(ranks)}
    fine = [1, 1, 1]
    assert ends == dict.fromkeys(range(ranks), [*fine, "ConfigError", "DataError", 1, "ObserverFailed", *fine])
    threads = [each["threads"] for each in found if each["call"] in {8, 10}]
    assert max(threads) - min(threads) < 4, "groups of earlier calls are given back, and each has three threads"
