"""Buffers that belong to a model's weights: pushed with them, and missed where they are not sent on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.export.assets import write_assets
from holdfast.config.load import from_mapping
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import RunStopped
from holdfast.features.vllm.processes import Servers, ServerSpec
from holdfast.features.vllm.publish import ServedEngine
from holdfast.models.setup.model import blueprint
from holdfast.parallel.mesh import World
from holdfast.training.engines import open_engine
from holdfast.training.run import Run
from holdfast.training.setup.begin import Live, build_model
from tests.features.vllm.real.conftest import PYTHON, free_port, tree_of

GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 128,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
"""Each layer has a scalar in a buffer that files hold."""


def test_buffers_are_pushed_and_one_that_is_not_sent_on_stops_the_run(world: World, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    config = from_mapping(tree_of([url], model={"config": GEMMA}), GRPOConfig)
    (tmp_path / "model").mkdir()
    write_assets(tmp_path / "model", blueprint(config.model, tmp_path, seed=0), torch.float32)
    shutil.copyfile(Path(__file__).with_name("faulty_extension.py"), tmp_path / "faulty_extension.py")
    section = VLLMEngineConfig(url=[url], start=True, python=PYTHON)
    served = ServerSpec(
        section, tmp_path / "model", "policy", "float32", 256, True, tmp_path, "faulty_extension.Extension"
    )
    with Servers(served):
        model = build_model(Run.of(config, Path.cwd(), world), Live(), lambda _: None)
        engine = open_engine(model, config.rollout)
        assert isinstance(engine, ServedEngine)
        scalars = [buffer for name, buffer in model.module.named_buffers() if name.endswith("layer_scalar")]
        engine.publish(model)

        for scalar in scalars:
            scalar.mul_(0.7)
        model.state.updates += 1
        engine.publish(model)
        assert max(proof.difference for proof in engine.proofs) <= 1e-4
        assert min(proof.from_before for proof in engine.proofs) > 1e-3

        for scalar in scalars:
            scalar.mul_(1.1)
        model.state.updates += 1
        (tmp_path / "fault.json").write_text(json.dumps({"fault": "buffer_not_sent"}))
        with pytest.raises(RunStopped, match="not what was sent: model.layers.0.layer_scalar"):
            engine.publish(model)
        engine.close()
