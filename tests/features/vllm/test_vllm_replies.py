"""What a real vLLM answered (tools/record_vllm.py), read by our client; no server is needed."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.features.vllm.responses import inspection_of, reply_of
from holdfast.http import EndpointRefuses
from holdfast.types import Finish
from tests.features.vllm.served import ServedModel, of_the_extension

FOLDER = Path(__file__).parent / "vllm_replies"


def recorded(name: str) -> dict[str, Any]:
    """Return what was asked, the status, and the answer as JSON."""
    record: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return record | {"answer": json.loads(record["answer"])}


def read(name: str, change: Any = None) -> Any:
    """Read an answer as the client does, changed if asked to."""
    record = recorded(name)
    answer = copy.deepcopy(record["answer"])
    if change is not None:
        change(answer["choices"][0])
    return reply_of(answer, record["content"]["sampling_params"]["max_tokens"])


def test_a_completion_has_its_tokens_log_probabilities_and_weights() -> None:
    choice = recorded("generate")["answer"]["choices"][0]

    reply = read("generate")

    assert reply.tokens.tolist() == choice["token_ids"]
    assert len(reply.tokens) == 6
    assert np.allclose(reply.logprobs, [entry["logprob"] for entry in choice["logprobs"]["content"]])
    assert reply.finish is Finish.LENGTH
    assert reply.spans[0][0] == 0


def test_a_stop_token_ends_a_completion_and_belongs_to_it() -> None:
    reply = read("stop")

    assert reply.finish is Finish.STOP
    assert len(reply.tokens) == 1


def test_an_answer_without_log_probabilities_is_refused() -> None:
    with pytest.raises(EndpointRefuses, match=r"/inference/v1/generate with choices\[0\].logprobs null, where"):
        read("no_logprobs")


def test_an_answer_that_the_context_cut_is_refused_although_it_came_with_200() -> None:
    assert recorded("cut_by_the_context")["status"] == 200

    with pytest.raises(EndpointRefuses, match="cut a completion at 6 tokens where 20 were asked for"):
        read("cut_by_the_context")


@pytest.mark.parametrize("name", ["prompt_too_long", "unknown_token"])
def test_what_cannot_be_completed_is_no_200(name: str) -> None:
    assert recorded(name)["status"] == 400


def test_a_missing_log_probability_is_none_and_not_zero() -> None:
    def forget(choice: dict[str, Any]) -> None:
        choice["logprobs"]["content"][2]["logprob"] = None
        choice["logprobs"]["content"][3]["logprob"] = -9999.0

    reply = read("generate", forget)

    assert [math.isnan(value) for value in reply.logprobs] == [False, False, True, True, False, False]


def test_tokens_beside_other_log_probabilities_are_refused() -> None:
    def encode_again(choice: dict[str, Any]) -> None:
        choice["token_ids"] = [*choice["token_ids"][:-1], 1, 2]

    with pytest.raises(EndpointRefuses, match="which are not the 7 it chose"):
        read("generate", encode_again)


def test_tokens_of_unknown_weights_are_refused() -> None:
    def forget(choice: dict[str, Any]) -> None:
        choice["weight_versions"] = []

    with pytest.raises(EndpointRefuses, match="of which weights its first token is"):
        read("generate", forget)


def test_weights_that_change_on_the_way_are_told_as_parts() -> None:
    def change(choice: dict[str, Any]) -> None:
        choice["weight_versions"] = [{"version": "a", "start": 0, "end": 4}, {"version": "b", "start": 4, "end": 6}]

    assert read("generate", change).spans == ((0, "a"), (4, "b"))


def test_a_server_says_what_a_run_compares_before_its_first_step() -> None:
    facts = recorded("identity")["answer"]["results"][0]

    assert facts["backend"] == "holdfast"
    assert facts["logprobs"] == "processed_logprobs"
    assert not facts["tied"]
    assert {"identity", "dtype", "longest", "vocabulary", "block", "device", "experts", "workers"} <= set(facts)
    assert {"version", "tokenizer", "template", "holder"} <= set(facts)
    assert facts["version"].startswith(VLLMEngineConfig(url=["http://127.0.0.1:8700"]).version)


def test_a_server_says_which_run_pushes_to_it() -> None:
    record = recorded("lease")
    served = ServedModel()

    told = record["answer"]["results"][0]

    assert told == served.lease.ask(**record["content"]["kwargs"], replaces=None, clock=0.0)
    assert told["holder"] == record["content"]["kwargs"]["holder"]


def test_the_most_probable_tokens_of_a_prompt_come_by_id() -> None:
    rows = recorded("prompt_logprobs")["answer"]["prompt_logprobs"]

    assert rows[0] is None
    assert all(len(row) in {20, 21} for row in rows[1:])
    assert all(token.isdigit() for row in rows[1:] for token in row)


def test_a_completion_that_was_ended_has_what_there_was() -> None:
    reply = read("aborted")

    assert reply.finish is Finish.ABORT
    assert reply.tokens.size == 0


def test_every_worker_of_a_server_is_heard_and_the_furthest_counts() -> None:
    workers = [{"a": 0.0, "b": None, "c": 0.5}, {"a": 0.25, "b": None, "c": None}, {"a": math.nan, "b": None, "c": 0.1}]

    told = inspection_of({"results": workers[:2]})

    assert told == {"a": 0.25, "b": None, "c": 0.5}
    assert math.isnan(inspection_of({"results": workers})["a"] or 0.0)


class PartOfALayer(torch.nn.Module):
    """A layer whose worker holds some of its rows and computes with them, as vLLM's linear layers do."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(rows, requires_grad=False)
        self.quant_method, self.output_sizes = self, [8, 8]

    def apply(self, layer: PartOfALayer, inputs: torch.Tensor, bias: None) -> torch.Tensor:
        return inputs @ layer.weight.t()


@pytest.mark.parametrize(("ranks", "told"), [(1, pytest.approx(0.0, abs=1e-6)), (2, None)])
def test_a_layer_whose_rows_workers_share_says_that_it_cannot_tell(ranks: int, told: Any) -> None:
    difference = of_the_extension("PROBES = 4", "@dataclass\nclass Lease", {"torch": torch})["difference"]
    sent = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    norm = torch.nn.LayerNorm(6)
    rows = torch.cat([part[: 8 // ranks] for part in sent.split(8)])  # of the first worker: its share of each matrix
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"gate_up_proj": PartOfALayer(rows)}), "norm": norm})
    model.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}

    gate = difference(model, "mlp.gate_proj.weight", sent[:8], ranks)
    up = difference(model, "mlp.up_proj.weight", sent[8:], ranks)

    assert (gate, up) == (told, told)
    assert difference(model, "norm.weight", torch.ones(6), ranks) == 0.0
