"""Experts on vLLM's CPU build: refused by name, until a push of them is right there."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.export.assets import write_assets
from holdfast.config.load import from_mapping
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.features.vllm.processes import Servers, ServerSpec
from holdfast.models.setup.model import blueprint
from holdfast.parallel.mesh import World
from holdfast.training.engines import open_engine
from holdfast.training.run import Run
from holdfast.training.setup.begin import Live, build_model
from tests.features.vllm.real.conftest import MODEL, PYTHON, free_port, tree_of

EXPERTS: dict[str, Any] = {
    **{name: value for name, value in MODEL.items() if name != "head_dim"},
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


@pytest.mark.xfail(raises=ConfigError, strict=True, reason="vLLM 0.32 on a CPU serves pushed experts wrongly")
def test_experts_are_sampled_from_servers(world: World, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    config = from_mapping(tree_of([url], model={"config": EXPERTS}), GRPOConfig)
    (tmp_path / "model").mkdir()
    write_assets(tmp_path / "model", blueprint(config.model, tmp_path, seed=0), torch.float32)
    section = VLLMEngineConfig(url=[url], start=True, python=PYTHON)

    served = ServerSpec(section, tmp_path / "model", "policy", "float32", 256, True, tmp_path)
    with ExitStack() as stack:
        try:
            stack.enter_context(Servers(served))
        except ConfigError as error:  # of the class that is expected below, and not what is expected
            raise AssertionError(error) from error
        model = build_model(Run.of(config, Path.cwd(), world), Live(), lambda _: None)
        with pytest.raises(ConfigError, match="serves a mixture of experts on a CPU") as caught:
            open_engine(model, config.rollout)
        raise caught.value
