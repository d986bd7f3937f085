"""Adapters: merged into the weights that are pushed, or pushed alone, for as many steps as a run has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from holdfast.config.sections.model import LoRAConfig
from holdfast.errors import ConfigError, RunStopped
from holdfast.features.vllm.adapters import AdapterPublisher
from holdfast.features.vllm.lora import limits_of
from holdfast.parallel.mesh import World
from tests.features.vllm.real.conftest import Fleet, Policy, policy_for, serving, tree_of

PUSHES = 60
GROWTH_MIB = 64
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "ranks": {"q_proj": 8}}
"""With a layer of another rank."""


@pytest.fixture(scope="module")
def with_adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Give a server that takes adapters."""
    limits = limits_of(LoRAConfig.model_validate(LORA), 0)
    with serving(tree_of, tmp_path_factory.mktemp("adapters"), adapters=limits) as servers:
        yield servers


def test_sixty_pushes_of_adapters_alone_are_proved_and_take_no_more_memory(
    with_adapters: Fleet, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, write = [], AdapterPublisher._write

    def noted(self: AdapterPublisher, directory: Path, *rest: Any) -> dict[str, str]:
        digests = write(self, directory, *rest)
        sizes.append(sum(file.stat().st_size for file in directory.iterdir()))
        return digests

    monkeypatch.setattr(AdapterPublisher, "_write", noted)
    policy = policy_for(adapter_tree(with_adapters, LORA), world)
    factors = sum(value.numel() for name, value in policy.model.module.named_parameters() if ".lora_" in name)
    with closing(policy.engine):
        policy.publish()
        move_adapters(policy, 0.3)
        policy.publish()
        before = _resident_mib(with_adapters)
        for number in range(PUSHES):
            move_adapters(policy, 0.05, number)
            policy.publish()
            assert max(proof.difference for proof in policy.engine.proofs) <= 1e-4
            assert min(proof.from_before for proof in policy.engine.proofs) > 1e-4  # the push changed something
        loaded = policy.engine.servers[0].control.ask("GET", "/v1/models")["data"]

    assert len(loaded) == 2  # the base and the last adapter
    assert _resident_mib(with_adapters) - before < GROWTH_MIB
    assert len(sizes) == PUSHES + 2
    assert max(sizes) <= 1.1 * factors * 4 + 4096  # a config of two KiB beside a small adapter


def adapter_tree(fleet: Fleet, lora: dict[str, Any]) -> dict[str, Any]:
    """Return a run that pushes its adapters alone."""
    tree = tree_of(fleet.urls, model={"lora": lora})
    tree["rollout"]["engine"]["push"] = "adapters"
    return tree


def move_adapters(policy: Policy, scale: float, seed: int = 0) -> None:
    """Change the factors alone: the base is frozen."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in policy.model.module.named_parameters():
            if ".lora_" in name:
                value.add_(scale * 0.1 * torch.randn(value.shape, generator=draw))
    policy.model.state.updates += 1


def rewrite(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        file = directory / "adapter_model.safetensors"
        save_file({name: value.contiguous() for name, value in change(load_file(file)).items()}, file)

    return spoil


def double(directory: Path) -> None:
    file = directory / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"lora_alpha": 2 * settings["lora_alpha"]}))


def truncate(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


SPOILED = {
    "scale doubled": (double, "say other log-probabilities than the trainer"),
    "half of the tensors": (
        rewrite(lambda tensors: dict(sorted(tensors.items())[: len(tensors) // 4 * 2])),
        "say other log-probabilities than the trainer",
    ),
    "half a file": (truncate, "refuses the adapter that was pushed to it"),
    "other rank": (
        rewrite(lambda t: {n: v[:2] if ".lora_A." in n else v[:, :2] for n, v in t.items()}),
        "say other log-probabilities than the trainer",
    ),
}


@pytest.mark.parametrize("fault", [*SPOILED, "wrong base", "old adapter", "name reused"])
def test_faults_of_adapters_are_found(
    with_adapters: Fleet, world: World, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    policy = policy_for(adapter_tree(with_adapters, LORA), world)
    server = policy.engine.servers[0]
    with closing(policy.engine):
        if fault == "wrong base":
            with_adapters.plant("half_a_bucket")
        else:
            policy.publish()
            move_adapters(policy, 0.3)
        words = "say other log-probabilities than the trainer"
        if fault in SPOILED:
            spoil, words = SPOILED[fault]
            load = type(server).load_adapter
            monkeypatch.setattr(
                type(server), "load_adapter", lambda self, label, path: (spoil(path), load(self, label, path))[1]
            )
        if fault == "old adapter":
            load = type(server).load_adapter
            old = next(iter(policy.engine._adapters._loaded.values())).directory
            monkeypatch.setattr(type(server), "load_adapter", lambda self, label, _: load(self, label, old))
            words = "its weights are stale"
        if fault == "name reused":
            policy.engine._pushes -= 1
            words = "has already been loaded"
        try:
            with pytest.raises(RunStopped, match=words):
                policy.publish()
        finally:
            with_adapters.heal()


def test_an_adapter_of_a_larger_rank_than_the_servers_is_refused(with_adapters: Fleet, world: World) -> None:
    with pytest.raises(ConfigError, match="takes adapters up to rank 8, and model.lora has 12"):
        policy_for(adapter_tree(with_adapters, {"rank": 12}), world)


def test_sixty_pushes_of_adapters_are_proved_and_take_no_more_memory(
    policy_of: Callable[..., Policy], fleet: Fleet
) -> None:
    policy = policy_of(model={"lora": {"rank": 4}})
    policy.publish()
    policy.move(0.3)
    policy.publish()
    before = _resident_mib(fleet)

    for number in range(PUSHES):
        policy.move(0.05, number)
        policy.publish()
        assert max(proof.difference for proof in policy.engine.proofs) <= 1e-4
        assert min(proof.from_before for proof in policy.engine.proofs) > 1e-4  # the push changed something

    assert _resident_mib(fleet) - before < GROWTH_MIB


def _resident_mib(fleet: Fleet) -> float:
    leaders = [psutil.Process(process.pid) for process in fleet.servers.processes]
    everyone = [each for leader in leaders for each in (leader, *leader.children(recursive=True))]
    return sum(each.memory_info().rss for each in everyone) / 2**20
