"""How far a server may differ is measured on the model that is served: deep ones with sharp logits round more."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from holdfast.errors import RunStopped
from holdfast.features.vllm.proof import _ask, _rounding, _score, _sequences
from holdfast.parallel.mesh import World
from tests.features.vllm.real import proxy
from tests.features.vllm.real.conftest import MODEL, Fleet, Policy, policy_for, serving, tree_of
from tests.features.vllm.real.test_pushes import BEHIND_THE_TRANSFER

REAL = os.environ.get("HOLDFAST_REAL_MODEL", "")
"""Directory of a pretrained model, as `examples/real/smollm2.py` writes it."""
DEEP = {**MODEL, "num_hidden_layers": 24, "initializer_range": 0.8}

Case = tuple[Policy, Fleet]


def tree(kind: str, urls: Sequence[str]) -> dict[str, Any]:
    """Return a run's tree for the real model or the deep one."""
    model = {"path": REAL} if kind == "real" else {"config": DEEP, "tokenizer": "builtin:characters"}
    return {**tree_of(urls), "model": model}


@pytest.fixture(scope="module", params=["deep", "real"])
def case(request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """Give a policy and the one server that samples from it."""
    kind = request.param
    if kind == "real" and not REAL:
        pytest.skip("needs a real model; HOLDFAST_REAL_MODEL names none")
    folder = tmp_path_factory.mktemp(kind)
    with serving(lambda urls: tree(kind, urls), folder) as servers:
        policy = policy_for(tree(kind, servers.urls), world)
        yield policy, servers
        policy.engine.close()


def test_a_sound_push_differs_by_less_than_a_few_roundings(case: Case) -> None:
    policy, _ = case

    policy.publish()

    (proof,) = policy.engine.proofs
    prover = policy.engine._prover
    sequences = _sequences(policy.model, prover.lengths)
    answers = _ask(policy.engine.servers, sequences, "")
    rounding = _rounding(policy.model, sequences, answers, _score(policy.model, sequences, answers))
    print(f"differs by {proof.difference:.2e}, rounding {rounding:.2e}, limit {prover.limit:.2e}")
    assert proof.difference < 3 * rounding
    if policy.model.run.config.model.path is None:
        assert 1e-4 < proof.difference < prover.limit


@pytest.mark.parametrize("scale", [1e-3, 0.3])
@pytest.mark.parametrize("fault", BEHIND_THE_TRANSFER)
def test_every_fault_behind_the_transfer_is_beyond_the_measured_limit(case: Case, fault: str, scale: float) -> None:
    policy, servers = case
    policy.publish()
    before = {name: value.clone() for name, value in policy.model.module.state_dict().items()}
    policy.move(scale, seed=1)
    servers.plant(fault)

    # vLLM fills the rest of a layer with whatever was in memory, NaN at times: it answers 400
    with pytest.raises(RunStopped, match="say other log-probabilities|so the push cannot be proved") as caught:
        policy.publish()

    print(caught.value)
    servers.heal()
    policy.model.module.load_state_dict(before)
    policy.publish()


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
def test_every_fault_of_the_transfer_is_found_by_the_measured_limit_or_by_bytes(
    case: Case, world: World, request: pytest.FixtureRequest, spoil: Any, words: str
) -> None:
    policy, servers = case
    spoiler = proxy.Spoiler()
    with proxy.between(servers.urls[0], spoiler) as url:
        policy.engine.close()
        through = policy_for(tree(request.node.callspec.params["case"], [url]), world)
        try:
            through.publish()
            through.move(0.01, seed=2)
            spoiler.request = spoil
            with pytest.raises(RunStopped, match=words):
                through.publish()
        finally:
            through.engine.close()
