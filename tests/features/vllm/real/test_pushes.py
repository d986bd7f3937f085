"""Weights on a real vLLM: pushed, proved, and every fault that others have met caught before a sample is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import ConfigError, RunStopped
from holdfast.rollout.engine import Request, Sampled, generate
from holdfast.types import Finish
from tests.features.vllm.real import proxy
from tests.features.vllm.real.conftest import MODEL, Fleet, Policy

Build = Callable[..., Policy]
BEHIND_THE_TRANSFER = [
    "stale", "gate_as_up", "adapter_twice", "half_a_bucket", "other_dtype", "head_not_sent", "norm_not_sent",
]  # fmt: skip
NAMED = {
    "gate_as_up": "model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight.",
    "adapter_twice": "model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_proj.weight",
    "head_not_sent": "lm_head.weight.",
    "norm_not_sent": "model.norm.weight.",
}
"""Tensors that the server itself finds to differ."""


def requests(count: int, each: int = 4) -> list[Request]:
    """Return prompts of different lengths, with seeds of their own."""
    draw = np.random.default_rng(3)
    prompts = [draw.integers(4, 40, 5 + number).astype(np.int64) for number in range(count)]
    return [
        Request(number, prompt, tuple(range(100 * number, 100 * number + each)))
        for number, prompt in enumerate(prompts)
    ]


def scored(policy: Policy, asked: list[Request], completions: list[Sampled], sampling: SamplingConfig) -> float:
    """Return the largest difference of a log-probability from plain transformers' at the same temperature."""
    oracle, worst = policy.oracle(), 0.0
    for completion in completions:
        prompt = asked[completion.request_id].prompt
        tokens = torch.from_numpy(np.concatenate([prompt, completion.tokens]))
        with torch.no_grad():
            logits = oracle(input_ids=tokens[None]).logits[0].float() / sampling.temperature
        if sampling.top_k is not None:
            least = logits.topk(sampling.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chosen = logits.log_softmax(-1)[prompt.size - 1 : -1].gather(1, torch.from_numpy(completion.tokens)[:, None])
        worst = max(worst, float((chosen[:, 0] - torch.from_numpy(completion.logprobs)).abs().max()))
    return worst


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 20}])
def test_log_probabilities_of_samples_are_the_trainers(policy_of: Build, options: dict[str, Any]) -> None:
    policy = policy_of()
    sampling = SamplingConfig(max_new_tokens=24, **options)
    asked = requests(6)

    policy.publish()
    first = generate(policy.engine, asked, sampling)
    policy.move(0.3)
    policy.publish()
    second = generate(policy.engine, asked, sampling)

    assert scored(policy, asked, second, sampling) <= 1e-4
    assert scored(policy, asked, first, sampling) > 1e-2  # of the weights before
    assert {completion.weights_version for completion in first} == {0}
    assert {completion.weights_version for completion in second} == {1}


def test_completions_that_live_through_a_push_tell_which_tokens_are_of_which_weights(policy_of: Build) -> None:
    policy = policy_of()
    policy.publish()
    asked, sampling = requests(40), SamplingConfig(max_new_tokens=190)
    before = policy.oracle()

    flight = policy.engine.begin(asked, sampling)
    while len(flight.finished()) < 40:  # of 160, of which 64 are asked for at a time
        time.sleep(0.01)
    policy.move(0.3)
    policy.publish()
    completions = flight.collect()

    after, changed = policy.oracle(), [each for each in completions if each.segments]
    assert changed
    for each in changed:
        (_, first), (start, second) = each.segments
        assert (first, second) == (0, 1)
        tokens = torch.from_numpy(np.concatenate([asked[each.request_id].prompt, each.tokens]))
        told, size = torch.from_numpy(each.logprobs), len(asked[each.request_id].prompt)
        for oracle, part in ((before, slice(0, start)), (after, slice(start, None))):
            with torch.no_grad():
                logprobs = oracle(input_ids=tokens[None]).logits[0, size - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(1, tokens[size:, None])[:, 0]
            assert float((chosen - told)[part].abs().max()) <= 1e-4


def test_equal_requests_have_equal_samples_whichever_server_answers(policy_of: Build) -> None:
    policy = policy_of()
    sampling = SamplingConfig(max_new_tokens=24)
    policy.publish()

    once, again = (generate(policy.engine, requests(6), sampling) for _ in range(2))

    assert [each.tokens.tolist() for each in once] == [each.tokens.tolist() for each in again]
    assert [(each.request_id, each.place) for each in once] == [(n, place) for n in range(6) for place in range(4)]
    assert {each.finish for each in once} <= {Finish.STOP, Finish.LENGTH}


def test_a_rollout_that_is_interrupted_ends_at_once_as_aborted(policy_of: Build) -> None:
    policy = policy_of()
    policy.publish()

    completions = generate(policy.engine, requests(40), SamplingConfig(max_new_tokens=190), lambda: True)

    assert Finish.ABORT in {completion.finish for completion in completions}


def test_texts_end_completions_and_belong_to_them(policy_of: Build) -> None:
    policy = policy_of()
    policy.publish()
    decode = policy.model.blueprint.tokenizer.decode
    asked = requests(6)
    whole = generate(policy.engine, asked, SamplingConfig(max_new_tokens=24))
    stop = decode(whole[0].tokens.tolist())[3:5]

    ended = generate(policy.engine, asked, SamplingConfig(max_new_tokens=24, stop=[stop]))

    assert ended[0].finish is Finish.STOP
    assert ended[0].tokens.tolist() == whole[0].tokens.tolist()[: ended[0].tokens.size]
    assert stop in decode(ended[0].tokens.tolist())
    assert stop not in decode(ended[0].tokens.tolist()[:-1])


@pytest.mark.parametrize("scale", [0.3, 1e-3])
@pytest.mark.parametrize("fault", BEHIND_THE_TRANSFER)
def test_a_fault_behind_the_transfer_stops_the_run(policy_of: Build, fleet: Fleet, fault: str, scale: float) -> None:
    policy = policy_of()
    policy.publish()
    policy.move(scale, seed=1)
    fleet.plant(fault)
    words = "say other log-probabilities than the trainer"
    if (
        fault == "half_a_bucket"
    ):  # vLLM fills the rest of a layer with whatever was in memory, NaN at times: it answers 400
        words += "|so the push cannot be proved"

    with pytest.raises(RunStopped, match=words) as caught:
        policy.publish()

    if fault == "stale":
        assert "its weights are stale" in str(caught.value)
    if "say other" in str(caught.value) and fault in NAMED:
        assert f"not what was sent: {NAMED[fault]}" in str(caught.value)
    fleet.heal()
    policy.publish()
    assert max(proof.difference for proof in policy.engine.proofs) <= 1e-4


def test_a_fault_in_one_of_two_servers_names_it(policy_of: Build, fleet: Fleet) -> None:
    policy = policy_of()
    policy.publish()
    policy.move(0.01)
    fleet.plant("stale", policy.engine.servers[1].state().identity)

    with pytest.raises(RunStopped, match=r"1 others agree") as caught:
        policy.publish()

    assert f"{fleet.urls[1]} by" in str(caught.value)
    assert f"{fleet.urls[0]} by" not in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (proxy.keeps_cache, "the cache of keys and values is of older weights"),
        (proxy.swallows_buckets, "its weights are stale"),
        (proxy.colder, "say other log-probabilities"),
        (proxy.changes_an_element, "arrived with other bytes than were sent"),
    ],
    ids=["prefix cache kept", "version stamped and nothing pushed", "other temperature", "one element changed"],
)
def test_a_fault_on_the_way_to_one_of_two_servers_stops_the_run(
    policy_of: Build, fleet: Fleet, spoil: Any, words: str
) -> None:
    spoiler = proxy.Spoiler()
    with proxy.between(fleet.urls[1], spoiler) as url:
        policy = policy_of([fleet.urls[0], url])
        policy.publish()
        policy.move(0.01)
        spoiler.request = spoil

        with pytest.raises(RunStopped, match=words) as caught:
            policy.publish()
        policy.engine.close()  # while servers can still be reached by this address

    assert url in str(caught.value)


def test_tokens_that_were_encoded_again_are_refused(policy_of: Build, fleet: Fleet) -> None:
    spoiler = proxy.Spoiler()
    with proxy.between(fleet.urls[0], spoiler) as url:
        policy = policy_of([url])
        policy.publish()
        spoiler.answer = proxy.encodes_again

        with pytest.raises(RunStopped, match="which are not the"):
            generate(policy.engine, requests(2), SamplingConfig(max_new_tokens=8))
        policy.engine.close()  # while the server can still be reached by this address


def test_of_ten_faults_drawn_at_random_at_least_nine_are_caught(policy_of: Build, fleet: Fleet) -> None:
    policy = policy_of()
    policy.publish()
    missed = []
    for seed in range(10):
        policy.move(0.01, seed)
        fleet.plant("mutation", seed=seed)
        try:
            policy.publish()
            missed.append((seed, [proof.difference for proof in policy.engine.proofs]))
        except RunStopped:
            pass
        fleet.heal()
        policy.publish()

    print("mutations that were missed:", missed)
    assert len(missed) <= 1


def test_a_second_run_is_refused_by_the_servers_themselves_until_the_first_has_ended(
    policy_of: Build, fleet: Fleet, tmp_path: Path
) -> None:
    first = policy_of()
    second = policy_of(rollout={"engine": {"kind": "vllm", "url": fleet.urls, "folder": str(tmp_path)}})
    first.publish()

    with pytest.raises(ConfigError, match="another run pushes weights to"):
        second.publish()
    first.engine.close()
    second.publish()

    assert len(second.engine.proofs) == 2


def test_a_server_whose_context_is_too_short_is_refused_before_step_1(policy_of: Build) -> None:
    longer = {"config": {**MODEL, "max_position_embeddings": 512}}

    with pytest.raises(ConfigError, match="has a context of 256 tokens, and data.max_length is 300"):
        policy_of(data={"max_length": 300}, model=longer)


def test_a_server_of_another_vocabulary_is_refused_before_step_1(policy_of: Build) -> None:
    with pytest.raises(ConfigError, match="its vocabulary has 64 tokens, the policy's 80"):
        policy_of(model={"config": {**MODEL, "vocab_size": 80}})


def test_no_server_at_an_address_is_told_before_step_1(policy_of: Build) -> None:
    with pytest.raises(ConfigError, match="no server answers at http://127.0.0.1:9: start it with `holdfast serve"):
        policy_of(["http://127.0.0.1:9"])
