"""Two servers for all tests of a session, and a policy in this process that samples from them."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from holdfast.checkpoint.export.assets import write_assets
from holdfast.config.load import from_mapping
from holdfast.config.sections.engine import StartConfig, VLLMEngineConfig
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.features.vllm.lora import AdapterLimits
from holdfast.features.vllm.processes import Servers, ServerSpec
from holdfast.features.vllm.publish import ServedEngine
from holdfast.models.setup.model import blueprint
from holdfast.parallel.mesh import World, joined_world
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.training.engines import open_engine
from holdfast.training.run import Model, Run
from holdfast.training.setup.begin import Live, build_model

PYTHON = os.environ.get("HOLDFAST_VLLM_PYTHON", "")
"""That of an environment with vLLM, where `make test-vllm` runs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these to `make test-vllm`, and let those with servers of their own run before the session's two start."""
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in own:
        item.add_marker("slow")
        item.add_marker(pytest.mark.timeout(1200))
        if not PYTHON:
            item.add_marker(pytest.mark.skip(reason="needs a vLLM; make test-vllm installs one"))
    places = [number for number, item in enumerate(items) if item in own]
    ordered = sorted(own, key=lambda item: "fleet" in getattr(item, "fixturenames", ()))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
}


def tree_of(urls: Sequence[str], **sections: Any) -> dict[str, Any]:
    """Return a small policy's tree; sections are merged over the defaults."""
    tree: dict[str, Any] = {
        "steps": 3,
        "run": {"name": "r"},
        "model": {"config": MODEL, "tokenizer": "builtin:characters"},
        "data": {
            "synthetic": {"task": "sort", "rows": 200},
            "batch_size": 4,
            "max_length": 256,
            "max_prompt_length": 64,
        },
        "rollout": {
            "engine": {"kind": "vllm", "url": list(urls), "bucket_mib": 0.05},
            "group_size": 4,
            "max_new_tokens": 24,
            "show": 0,
        },
        "reward": "exact",
        "optim": {"lr": 1e-3},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) else values
    return tree


@dataclass
class Fleet:
    """Two servers, and what spoils what they are sent."""

    servers: Servers
    folder: Path
    urls: list[str] = field(default_factory=list)

    def plant(self, fault: str, identity: str | None = None, **more: Any) -> None:
        """Plant a fault in one server, or in all of them."""
        name = "fault.json" if identity is None else f"fault-{identity}.json"
        (self.folder / name).write_text(json.dumps({"fault": fault, **more}))

    def heal(self) -> None:
        """Take every fault away."""
        for file in self.folder.glob("fault*.json"):
            file.unlink()


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Give this process's world of one rank."""
    with joined_world(LaunchConfig(device="cpu")) as joined:
        yield joined


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Give two servers of vLLM, whose extension takes faults."""
    with serving(tree_of, tmp_path_factory.mktemp("fleet"), count=2) as servers:
        yield servers


@contextmanager
def serving(
    tree: Callable[[Sequence[str]], dict[str, Any]],
    folder: Path,
    *,
    count: int = 1,
    dtype: str = "float32",
    adapters: AdapterLimits | None = None,
    workers: int = 1,
) -> Iterator[Fleet]:
    """Start servers for the model of a tree, whose extension takes faults."""
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(count)]
    config = from_mapping(tree(urls), GRPOConfig)
    (folder / "model").mkdir()
    write_assets(folder / "model", blueprint(config.model, folder, seed=0), torch.float32)
    shutil.copyfile(Path(__file__).with_name("faulty_extension.py"), folder / "faulty_extension.py")
    start = StartConfig(tensor_parallel_size=workers)
    section = VLLMEngineConfig(url=urls, start=start, python=PYTHON)
    extension = "faulty_extension.Extension"
    served = ServerSpec(section, folder / "model", "policy", dtype, 256, True, folder, extension, adapters)
    with Servers(served) as servers:
        yield Fleet(servers, folder, urls)


@dataclass
class Policy:
    """A policy that servers sample from."""

    model: Model
    engine: ServedEngine

    def move(self, scale: float, seed: int = 0) -> None:
        """Change every tensor by a part of its deviation, as an update does."""
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in sharded_parameters(self.model.module).values():
                local = local_part(value)
                deviation = float(local.std()) if local.numel() > 1 else 0.1
                local.add_(scale * (deviation or 0.1) * torch.randn(local.shape, generator=draw))
        self.model.state.updates += 1

    def publish(self) -> None:
        """Push the present weights."""
        self.engine.publish(self.model)

    def oracle(self) -> Qwen3ForCausalLM:
        """Return plain transformers' model with the present weights."""
        model = Qwen3ForCausalLM(Qwen3Config(**{key: value for key, value in MODEL.items() if key != "model_type"}))
        state = {name: full_tensor(value) for name, value in sharded_parameters(self.model.module).items()}
        model.load_state_dict(state, strict=False)
        model.tie_weights()
        return model.eval()


def policy_for(tree: dict[str, Any], world: World) -> Policy:
    """Return the policy of a tree; whoever asks closes its engine."""
    config = from_mapping(tree, GRPOConfig)
    model = build_model(Run.of(config, Path.cwd(), world), Live(), lambda _: None)
    engine = open_engine(model, config.rollout)
    assert isinstance(engine, ServedEngine)
    return Policy(model, engine)


@pytest.fixture
def policy_of(world: World, fleet: Fleet) -> Iterator[Callable[..., Policy]]:
    """Give what builds a policy that samples from servers; it is closed with the test, and faults are taken away."""
    opened: list[ServedEngine] = []

    def build(urls: Sequence[str] | None = None, **sections: Any) -> Policy:
        policy = policy_for(tree_of(urls or fleet.urls, **sections), world)
        opened.append(policy.engine)
        return policy

    yield build
    fleet.heal()
    for engine in opened:
        engine.close()
