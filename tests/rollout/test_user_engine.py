"""`rollout.engine: my_engine.py:make`: an engine of the user's own samples, from whole weights, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.metrics.sink import METRICS, read_metrics
from holdfast.parallel.mesh import World
from holdfast.recipes.grpo import grpo
from tests.features.vllm.served import MODEL, REWARD, served_tree
from tests.features.vllm.test_served_runs import run
from tests.ranks import RankPool

ENGINE = f"""
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from holdfast.rollout.engine import Sampled
from holdfast.types import Finish


class Engine:
    def __init__(self, words):
        settings = {{name: value for name, value in {MODEL!r}.items() if name != "model_type"}}
        self.model, self.waiting, self.words = Qwen3ForCausalLM(Qwen3Config(**settings)).eval(), [], words

    def update_weights(self, tensors, version):
        self.model.load_state_dict({{name: tensor for name, tensor in tensors}}, strict=False)
        self.model.tie_weights()
        self.version = version

    def submit(self, requests, sampling):
        self.waiting += [(request, sampling) for request in requests]

    @torch.no_grad()
    def collect(self, interrupted=lambda: False):
        waiting, self.waiting = self.waiting, []
        done = []
        for request, sampling in waiting:
            for place, seed in enumerate(request.seeds):
                tokens, logprobs = request.prompt.tolist(), []
                draw = np.random.default_rng(seed)
                for _ in range(sampling.max_new_tokens):
                    values = self.model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
                    tokens.append(int((values.numpy() + draw.gumbel(size=len(values))).argmax()))
                    logprobs.append(float(values[tokens[-1]]))
                own = np.array(tokens[len(request.prompt):])
                told = np.array(logprobs, np.float32)
                done.append(Sampled(request.request_id, place, own, told, Finish.LENGTH, self.version))
        return done

    def sleep(self):
        return False

    def close(self):
        open(self.words, "a").write("closed\\n")


def make(words):
    return Engine(words)


def half(words):
    return object()
"""


def tree(place: Path, made: str = "make") -> dict[str, Any]:
    """Return a run with an engine of the user's own."""
    (place / "reward.py").write_text(REWARD)
    (place / "my_engine.py").write_text(ENGINE)
    values = served_tree([], str(place))
    values["rollout"]["engine"] = {
        "kind": "path", "path": f"my_engine.py:{made}", "kwargs": {"words": str(place / "words")},
    }  # fmt: skip
    return values


def in_a_pool(world: World, values: dict[str, Any], base: str) -> int:
    return grpo(from_mapping(values, GRPOConfig), Path(base), world).step


def test_an_engine_of_the_users_own_samples_on_every_rank(tmp_path: Path, pools: Any) -> None:
    pool: RankPool = pools(2)

    steps = pool.run(in_a_pool, tree(tmp_path), str(tmp_path))

    assert steps == [4, 4]
    metrics = [line for line in read_metrics(tmp_path / "r" / METRICS) if "loss" in line]
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-5 for line in metrics)
    assert (tmp_path / "words").read_text() == "closed\n" * 2


def test_what_is_no_engine_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="what my_engine.py:half returns has no update_weights, submit, collect"):
        run(tmp_path, tree(tmp_path, "half"))
