"""Adapters pushed alone: what travels, under which names, what is unloaded, and which faults a proof names."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.errors import ConfigError, RunStopped
from holdfast.metrics.sink import METRICS, read_metrics
from tests.features.vllm.served import AHEAD, ServedModel, served_tree, serving
from tests.features.vllm.test_served_runs import run

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}


def lora_tree(urls: list[str], directory: str, **sections: Any) -> dict[str, Any]:
    """Return a run whose policy has adapters."""
    tree = served_tree(urls, directory, **sections)
    tree["model"] = tree["model"] | {"lora": LORA | sections.get("lora", {})}
    tree.pop("lora", None)
    tree["rollout"]["engine"]["push"] = "auto"
    return tree


def adapters_of(served: ServedModel) -> tuple[list[str], list[str]]:
    """Return the names that were loaded and that were unloaded, in order."""
    events = [what.split() for _, what in served.events]
    return tuple([words[1] for words in events if words[0] == verb] for verb in ("loaded", "unloaded"))  # type: ignore[return-value]


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_push_of_adapters_moves_their_bytes_alone(tmp_path: Path, staleness: int) -> None:
    served = ServedModel(adapter_rank=32)
    with serving(served) as url:
        # Of a rank whose bytes are more than the file's header, as any real adapter's are.
        tree = lora_tree([url], str(tmp_path), steps=6, lora={"rank": 32}, **(AHEAD if staleness else {}))
        tree["rollout"]["max_staleness"] = staleness
        tree["rollout"]["engine"]["folder"] = str(tmp_path)
        run(tmp_path, tree)

    assert sum(what == "pushed" for _, what in served.events) == 1  # the base
    loaded, unloaded = adapters_of(served)
    # One before step 1, and one after each step whose weights are sampled from.
    assert len(loaded) == len(set(loaded)) >= 7 - staleness
    assert sorted(unloaded) == sorted(loaded)
    assert max(_alive(served)) <= staleness + 2
    assert not served.adapters
    adapter_bytes = sum(sum(layer.weight.shape) for layer in _layers(served)) * 32 * 4
    assert max(served.file_bytes[-len(loaded) :]) <= 1.1 * adapter_bytes
    metrics = [line for line in read_metrics(tmp_path / "r" / METRICS) if "loss" in line]
    assert len(metrics) == 6
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-4 for line in metrics[: 1 if staleness else None])
    assert not list(tmp_path.glob("holdfast-*/" + WEIGHTS))


def _alive(served: ServedModel) -> list[int]:
    counts = [0]
    for _, what in served.events:
        counts.append(counts[-1] + what.startswith("loaded") - what.startswith("unloaded"))
    return counts


def _layers(served: ServedModel) -> list[torch.nn.Linear]:
    return [layer for layer in served.model.model.layers.modules() if isinstance(layer, torch.nn.Linear)]


FIRST = 4 + 8 + 8
"""Completions of the rehearsal, of the evaluation and of step 1, which no push follows before they are trained."""


def _number(request: str) -> int:
    return int(request.split("-")[1])


def test_no_adapter_is_proved_while_completions_are_decoded_with_another(tmp_path: Path) -> None:
    """vLLM 0.32 on a CPU dies of that."""
    decoded: list[int] = []

    def answer(path: str, told: Any) -> Any:
        if path.endswith("generate") and "prompt_logprobs" in told:
            words = [what.split()[0] for _, what in served.events]
            decoded.append(words.count("asked") - words.count("answered"))
        return told

    def loads() -> int:
        return sum(what.startswith("loaded") for _, what in list(served.events))

    def before_token(name: str, number: int) -> None:
        before, end = loads(), time.monotonic() + 20
        while number == 0 and _number(name) > FIRST and loads() == before and time.monotonic() < end:
            time.sleep(0.01)

    # Completions of later steps begin with the load of the adapter that is proved next, and take half a second.
    served = ServedModel(adapter_rank=32, seconds=0.5, answer=answer, before_token=before_token)
    with serving(served) as url:
        tree = lora_tree([url], str(tmp_path), lora={"rank": 32}, **AHEAD)
        tree["rollout"]["max_staleness"] = 3
        run(tmp_path, tree)

    assert len(decoded) >= 4
    assert set(decoded) == {0}


def scaled(directory: Path) -> None:
    settings = json.loads((directory / SETTINGS).read_text())
    (directory / SETTINGS).write_text(json.dumps(settings | {"lora_alpha": 2 * settings["lora_alpha"]}))


def cut(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    half = {
        name: value if number % 4 < 2 else value * 0 for number, (name, value) in enumerate(sorted(tensors.items()))
    }
    save_file(half, directory / WEIGHTS)


def of_other_rank(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    save_file(
        {name: (value[:2] if ".lora_A." in name else value[:, :2]).contiguous() for name, value in tensors.items()},
        directory / WEIGHTS,
    )


FAULTS: dict[str, Callable[[ServedModel], None]] = {
    "wrong base": lambda served: setattr(served, "garble", lambda tensors: {n: v + 0.3 for n, v in tensors.items()}),
    "old adapter": lambda served: setattr(served, "taken", lambda _, new: next(iter(served.adapters.values()), new)),
    "scale doubled": lambda served: setattr(served, "spoil", scaled),
    "half a file": lambda served: setattr(served, "spoil", cut),
    "other rank": lambda served: setattr(served, "spoil", of_other_rank),
}  # fmt: skip
WORDS = {
    "wrong base": "these tensors are not what was sent: ",
    "old adapter": "its weights are stale; ",
    "scale doubled": "so what is wrong lies in the adapter",
    "half a file": "so what is wrong lies in the adapter",
    "other rank": "so what is wrong lies in the adapter",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_pushed_adapter_is_found_by_the_proof(tmp_path: Path, name: str) -> None:
    served = ServedModel(adapter_rank=8)
    FAULTS[name](served)
    with serving(served) as url, pytest.raises(RunStopped) as error:
        run(tmp_path, lora_tree([url], str(tmp_path)))

    assert f"servers say other log-probabilities than the trainer: {url}" in str(error.value)
    assert WORDS[name] in str(error.value)


def test_a_name_that_a_server_has_already_is_refused(tmp_path: Path) -> None:
    served = ServedModel(adapter_rank=8, has_name=lambda label: label.endswith("-2"))
    with serving(served) as url, pytest.raises(RunStopped) as error:
        run(tmp_path, lora_tree([url], str(tmp_path)))

    assert f"The server at {url} refuses the adapter that was pushed to it: it answers 400" in str(error.value)
    assert "has already been loaded" in str(error.value)
    assert "No sample of it was trained on" in str(error.value)


def test_files_that_a_server_sees_otherwise_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    def answer(path: str, told: Any) -> Any:
        if path == "/collective_rpc" and WEIGHTS in told["results"][0]:
            told["results"][0][WEIGHTS] = "0" * 32
        return told

    served = ServedModel(adapter_rank=8, answer=answer)
    with serving(served) as url, pytest.raises(RunStopped, match=f"sees other bytes of .*/{WEIGHTS} than were written"):
        run(tmp_path, lora_tree([url], str(tmp_path)))

    assert adapters_of(served) == ([], [])


def test_a_worker_that_does_not_say_what_it_sees_is_named(tmp_path: Path) -> None:
    served = ServedModel(adapter_rank=8, facts={"workers": 2})
    with serving(served) as url, pytest.raises(RunStopped, match="results a list of 1, where a list of at least 2 is"):
        run(tmp_path, lora_tree([url], str(tmp_path)))

    assert adapters_of(served) == ([], [])


def test_an_adapter_that_one_server_refuses_is_unloaded_from_the_others(tmp_path: Path) -> None:
    refusing = ServedModel(adapter_rank=8, has_name=lambda label: label.endswith("-2"))
    taking = ServedModel(adapter_rank=8)
    with serving(refusing) as url, serving(taking) as other, pytest.raises(RunStopped, match=f"at {url} refuses the"):
        run(tmp_path, lora_tree([url, other], str(tmp_path)))

    loaded, unloaded = adapters_of(taking)
    assert [label.rpartition("-")[2] for label in loaded] == ["1", "2"]
    assert sorted(unloaded) == sorted(loaded)


def test_a_run_from_another_checkpoint_pushes_the_base_of_that_one(tmp_path: Path) -> None:
    served = ServedModel(adapter_rank=8)
    with serving(served) as url:
        run(tmp_path, lora_tree([url], str(tmp_path), steps=1))
        tree = lora_tree([url], str(tmp_path), steps=2)
        tree["run"]["name"], tree["seed"] = "other", 7
        tree["checkpoint"]["init_from"] = str(tmp_path / "r/checkpoints/step-00000001")
        pushes = [what for _, what in served.events].count("pushed")
        run(tmp_path, tree)

    # One of the model that the run was built with, for the step before step 1, and one of the checkpoint.
    assert [what for _, what in served.events].count("pushed") == pushes + 2
    metrics = [line for line in read_metrics(tmp_path / "other" / METRICS) if "loss" in line]
    assert [line["sampling/sampling_logp_difference/max"] < 1e-4 for line in metrics] == [True, True]


@pytest.mark.parametrize(
    ("served", "sections", "words"),
    [
        (ServedModel(adapter_rank=2), {}, "takes adapters up to rank 2, and model.lora has 4 (--max-lora-rank; or set"),
        (ServedModel(), {"push": "adapters"}, "takes no adapters (--enable-lora; or set rollout.engine.push: weights"),
        (ServedModel(adapter_rank=8), {"push": "adapters", "lora": {"dora": True}}, "vLLM 0.32 has no DoRA"),
    ],
)
def test_adapters_that_no_server_takes_are_refused_before_step_1(
    tmp_path: Path, served: ServedModel, sections: dict[str, Any], words: str
) -> None:
    with serving(served) as url:
        tree = lora_tree([url], str(tmp_path), lora=sections.get("lora", {}))
        tree["rollout"]["engine"]["push"] = sections.get("push", "auto")
        with pytest.raises(ConfigError) as error:
            run(tmp_path, tree)

    assert words in str(error.value)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("rank", "push", "lora", "words"),
    [
        (None, "auto", {}, "adapters merged: a server takes no adapters (--enable-lora)"),
        (8, "auto", {"dora": True}, "adapters merged: vLLM 0.32 has no DoRA (model.lora.dora)"),
        (8, "weights", {}, ""),
    ],
)
def test_weights_are_pushed_where_adapters_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int | None, push: str, lora: dict[str, Any], words: str
) -> None:
    served = ServedModel(adapter_rank=rank)
    with serving(served) as url:
        tree = lora_tree([url], str(tmp_path), steps=2, lora=lora)
        tree["rollout"]["engine"]["push"] = push
        run(tmp_path, tree)

    assert adapters_of(served) == ([], [])
    assert sum(what == "pushed" for _, what in served.events) >= 3
    output = capsys.readouterr().out
    assert words in output
    assert ("adapters merged" in output) == bool(words)


def test_a_server_that_was_started_again_gets_the_base_once_more(tmp_path: Path) -> None:
    served = ServedModel(adapter_rank=8)

    def starts_again(label: str, model: Any) -> Any:  # noqa: ARG001 - as the server calls it
        if len(adapters_of(served)[0]) == 2:
            served.facts = {"identity": "another"}
            served.model.load_state_dict({name: value + 1 for name, value in served.model.state_dict().items()})
        return model

    served.taken = starts_again
    with serving(served) as url:
        run(tmp_path, lora_tree([url], str(tmp_path), steps=4))

    assert sum(what == "pushed" for _, what in served.events) == 2
    metrics = [line for line in read_metrics(tmp_path / "r" / METRICS) if "loss" in line]
    assert [line["sampling/sampling_logp_difference/max"] < 1e-4 for line in metrics] == [True] * 4


def test_two_servers_take_one_adapter_that_is_written_once(tmp_path: Path) -> None:
    first, second = ServedModel(adapter_rank=8), ServedModel(adapter_rank=8)
    with serving(first) as url, serving(second) as other:
        run(tmp_path, lora_tree([url, other], str(tmp_path), steps=2))

    assert adapters_of(first) == adapters_of(second)
    assert len(adapters_of(first)[0]) >= 3
