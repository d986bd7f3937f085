"""A run of a mixture of experts saves, resumes and exports like any other."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import Share, pack, unpack
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.metrics.sink import read_metrics
from holdfast.parallel.mesh import World
from holdfast.recipes.sft import sft_step
from holdfast.training.evaluate import evaluate
from holdfast.training.fit import fit
from holdfast.training.setup.begin import build_run
from holdfast.training.step import train_step
from holdfast.types import Example, Scores
from tests.crash.runs import log_of, state_differences
from tests.models.architectures import SETTINGS
from tests.tiny import tiny_directory, tiny_model
from tests.training.cases import run, tree

TOKENS = np.arange(2, 40)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mixtral")
    # Three experts: of four ranks, one holds none of them.
    options = {"num_local_experts": 3, "router_aux_loss_coef": 0.02, "output_router_logits": False}
    return str(tiny_directory(path, "mixtral", **options))


def values_of(place: Path, model: str, steps: int, **sections: Any) -> dict[str, Any]:
    return tree(
        str(place),
        steps=steps,
        model={"path": model, "config": None, "tokenizer": None},
        data={"tokens_per_micro_batch": 96},
        parallel={"recompute": "full"},
        checkpoint={"every_steps": 2, "keep": {"last": 9}},
        **sections,
    )


def trained(world: World, values: dict[str, Any]) -> tuple[str | None, np.ndarray]:
    """Return where the export stands, and what the trained policy itself says of some tokens."""
    built = build_run(from_mapping(values, SFTConfig), Path(), world)
    outcome = fit(built, partial(sft_step, built), partial(evaluate, built.evaluation))
    example = Example(0, 0, TOKENS, np.arange(TOKENS.size) > 0)
    built.model.module.eval()
    with torch.no_grad():
        scores = built.model.module(pack([example], [Share(1.0, 1.0)], padded=built.model.module.padded))
    assert isinstance(scores, Scores)
    return outcome.export, scores.logprobs.numpy()


def first_update(world: World, values: dict[str, Any]) -> tuple[list[list[int]], dict[str, float]]:
    """Make one update; return the sequences of all ranks and the metrics."""
    built = build_run(from_mapping(values, SFTConfig), Path(), world)
    mini_batch = built.stream.next(0)
    assert mini_batch is not None
    mine = [example.tokens.tolist() for batch in mini_batch.micro_batches for example in unpack(batch)]
    sequences = [tokens for part in built.run.ranks.gather(mine) for tokens in part]
    return sequences, train_step(built.model, mini_batch, built.evaluation.objective).read().metrics


@pytest.mark.slow
def test_a_resumed_run_is_the_straight_run_bit_for_bit(pools: Any, tmp_path: Path, mixtral: str) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    pools(2).run(run, values_of(straight, mixtral, 4))
    pools(2).run(run, values_of(resumed, mixtral, 2))

    pools(2).run(run, values_of(resumed, mixtral, 4))

    assert log_of(resumed) == log_of(straight)
    assert state_differences(resumed, straight) == []
    routed = [
        [line["router/loss"] for line in read_metrics(place / "r" / "metrics.jsonl")] for place in (straight, resumed)
    ]
    assert routed[0] == routed[1]
    assert len(set(routed[0])) == 4


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(pools: Any, tmp_path: Path, mixtral: str) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    pools(1).run(run, values_of(straight, mixtral, 4))
    pools(4).run(run, values_of(resumed, mixtral, 2))

    pools(1).run(run, values_of(resumed, mixtral, 4))

    for one, other in zip(log_of(resumed), log_of(straight), strict=True):
        assert one[1:3] == pytest.approx(other[1:3], rel=1e-4)  # loss and gradient norm


def test_plain_transformers_reads_the_export_and_says_the_same(pools: Any, tmp_path: Path, mixtral: str) -> None:
    from transformers import AutoModelForCausalLM

    place, ours = pools(2).run(trained, values_of(tmp_path, mixtral, 2))[0]

    model = AutoModelForCausalLM.from_pretrained(place)
    tokens = torch.as_tensor(TOKENS)[None]
    with torch.no_grad():
        theirs = model(input_ids=tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)
    before, after = (json.loads((Path(path) / "config.json").read_text()) for path in (mixtral, place))
    assert {name: after[name] for name in ("router_aux_loss_coef", "output_router_logits", "num_local_experts")} == {
        name: before[name] for name in ("router_aux_loss_coef", "output_router_logits", "num_local_experts")
    }


def test_a_bias_that_chooses_experts_counts_and_stays_as_it_is(pools: Any, tmp_path: Path) -> None:
    model = tiny_model("glm4_moe", **SETTINGS["glm4_moe"])
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.tensor([0.3, -0.2, 0.1, 0.5])
    model.get_buffer(name).copy_(bias)
    source = tmp_path / "source"
    model.save_pretrained(source)
    character_tokenizer().save_pretrained(source)
    values = values_of(tmp_path, str(source), 1)

    sequences, metrics = pools(2).run(first_update, values)[0]
    export = pools(2).run(run, values)[0].export

    counts = np.zeros(4)
    for tokens in sequences:
        with torch.no_grad():
            [logits] = model(torch.as_tensor(tokens)[None], output_router_logits=True).router_logits
        scores = 1 / (1 + np.exp(-logits.double().numpy())) + bias.numpy()
        counts += np.bincount(np.argsort(-scores, axis=1)[:, :2].ravel(), minlength=4)
    assert metrics["router/load_max"] == pytest.approx(counts.max() / counts.mean(), rel=1e-12)
    assert metrics["router/load_min"] == pytest.approx(counts.min() / counts.mean(), rel=1e-12)

    assert torch.equal(load_file(Path(export) / "model.safetensors")[name], bias)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.cases(1)
def test_a_token_costs_the_experts_it_is_sent_to(pools: Any, tmp_path: Path, mixtral: str, frozen: bool) -> None:
    values = values_of(tmp_path, mixtral, 1, metrics={"progress": "off", "peak_flops": 1e12})
    values["model"]["freeze"] = ["experts"] if frozen else []

    pools(2).run(run, values)

    line = read_metrics(tmp_path / "r" / "metrics.jsonl")[-1]
    experts = 2 * 2 * 3 * 32 * 64  # two layers, two of the three experts
    others = 2 * 96 * 32 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 + 64) + 32
    per_token = 6 * others + (4 if frozen else 6) * experts
    flops = line["data/tokens"] * (per_token + 6 * 2 * 32 * line["data/mean_length"])
    assert line["throughput/mfu"] == pytest.approx(flops / line["step_time"] / 2e12)
