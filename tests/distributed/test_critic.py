"""PPO: policy and critic make the paper's updates whatever the split; the critic warms up, is saved and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from holdfast.checkpoint.export.stored import export_stored
from holdfast.checkpoint.keep import find
from holdfast.data.tasks.synthetic import character_tokenizer
from tests.distributed.critic_cases import BETA, CLIP, GAMMA, HIGH, LAM, LOW, by_hand, live_run, saved, train
from tests.distributed.grpo_cases import prompts_of, settings
from tests.tiny import COMMON, tiny_directory, tiny_model

ROWS = prompts_of(12)
RATES = (0.3, 0.01)
"""Of policy and critic; high enough that ratios and values reach their bounds."""
KIND = "starcoder2"
"""Its norms keep float64, those of llama do not."""


def scorer(**overrides: Any) -> Any:
    config = AutoConfig.for_model(KIND, **COMMON | overrides, num_labels=1)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the directories of a policy and of a critic, which is another model of the same tokens."""
    policy = tiny_directory(tmp_path_factory.mktemp("policy"), KIND)
    critic = tmp_path_factory.mktemp("critic")
    scorer().save_pretrained(critic)
    character_tokenizer().save_pretrained(critic)
    return policy, critic


def sgd(lr: float) -> dict[str, Any]:
    return {"kind": "sgd", "lr": lr, "schedule": "constant", "clip_norm": None}


def ppo(places: tuple[Path, Path], **sections: Any) -> dict[str, Any]:
    tree = settings(
        str(places[0]),
        rollout={"group_size": 1},
        advantage={"kind": "gae", "gamma": GAMMA, "lam": LAM},
        critic={"path": str(places[1]), "optim": sgd(RATES[1]), "value_clip": CLIP},
        objective={"kind": "clip", "low": LOW, "high": HIGH},
        kl={"coefficient": BETA, "estimator": "k1", "where": "reward"},
        updates={"mini_batches": 2, "passes": 2},
        optim=sgd(RATES[0]),
    )
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) else values
    return tree


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(1, {}, id="1 rank"),
        pytest.param(1, {"data": {"packing": "none"}}, id="1 rank, padded"),
        pytest.param(2, {"data": {"tokens_per_micro_batch": 48}}, id="2 ranks, many micro-batches"),
        pytest.param(4, {"parallel": {"replicate": 2}, "rollout": {"group_size": 3}}, id="2 copies of 2 ranks, groups"),
    ],
)
def test_every_split_makes_the_updates_of_ppo(
    pools: Any, places: tuple[Path, Path], ranks: int, changes: dict[str, Any]
) -> None:
    found = pools(ranks).run(train, ppo(places, **changes), ROWS, 2)[0]
    expected = by_hand(tiny_model(KIND).double(), scorer().double(), found["sampled"], RATES)

    lines = found["lines"]
    np.testing.assert_allclose([line["value/loss"] for line in lines], expected["value_losses"], rtol=1e-10)
    np.testing.assert_allclose([line["value/explained_variance"] for line in lines], expected["explained"], rtol=1e-9)
    norms = [[line["value/grad_norm"], line["grad_norm"]] for line in lines]
    np.testing.assert_allclose(norms, expected["norms"], rtol=1e-10)
    for model, ours in (("policy", found["policies"][-1]), ("critic", found["critics"][-1])):
        assert set(ours) == set(expected[model])
        for name, parameter in expected[model].items():
            np.testing.assert_allclose(ours[name], parameter, rtol=0, atol=1e-10, err_msg=f"{model} {name}")
    assert all(line["value/clip_fraction"] > 0.05 for line in lines), "the case must reach the bound of values"
    assert all(line["clip_ratio/region_mean"] > 0.05 for line in lines), "the case must reach the bound of ratios"


def test_the_critic_warms_up_while_the_policy_stands_still(pools: Any, places: tuple[Path, Path]) -> None:
    tree = ppo(places, critic={"warmup_steps": 2, "optim": sgd(0.05) | {"schedule": {"kind": "linear"}}})

    found = pools(2).run(train, tree, ROWS, 3)[0]

    start, first, second, third = found["policies"]
    for name, parameter in start.items():
        np.testing.assert_array_equal(first[name], parameter, err_msg=name)
        np.testing.assert_array_equal(second[name], parameter, err_msg=name)
    assert any((third[name] != parameter).any() for name, parameter in start.items())
    for before, after in zip(found["critics"][:2], found["critics"][1:3], strict=True):
        assert all((after[name] != before[name]).any() for name in before)
    lines = found["lines"]
    assert [line["grad_norm"] > 0 for line in lines] == [False, False, True]
    assert [line["value/learning_rate"] for line in lines] == pytest.approx([0.05, 0.025, 0.0])
    assert (found["state"]["step"], found["state"]["updates"]) == (3, 4)
    assert found["state"]["companions"]["critic"]["updates"] == 12


def run_tree(places: tuple[Path, Path], place: Path, steps: int) -> dict[str, Any]:
    adam = {"kind": "adamw", "lr": 0.005, "schedule": "constant"}
    return ppo(
        places,
        steps=steps,
        run={"dir": str(place), "name": "r"},
        critic={"optim": adam, "freeze": ["embed"]},
        optim=adam,
        metrics={"progress": "off"},
        checkpoint={"every_steps": 2, "rehearsal": True, "export_at_end": False},
    )


@pytest.mark.slow
def test_a_critic_goes_on_at_another_number_of_ranks(pools: Any, places: tuple[Path, Path], tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    (whole, _) = pools(2).run(live_run, run_tree(places, straight, 4), ROWS)
    pools(2).run(live_run, run_tree(places, resumed, 2), ROWS)
    (again,) = pools(1).run(live_run, run_tree(places, resumed, 4), ROWS)

    one, two = saved(whole), saved(again)
    assert set(one) == set(two)
    assert {"critic.model.score.weight", "critic.optim.score.weight.exp_avg"} <= set(one)
    assert "critic.model.model.embed_tokens.weight" in one, "frozen, and saved"
    assert not [key for key in one if key.startswith("critic.optim.") and "embed" in key]
    for key, values in one.items():
        np.testing.assert_allclose(two[key], values, rtol=0, atol=1e-9, err_msg=key)
    export_stored([find.one(again)], tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="float64")
    for name, parameter in exported.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), two[f"model.{name}"], err_msg=name)
    alone = run_tree(places, resumed, 6) | {"advantage": {"kind": "reinforce_pp"}, "critic": None}
    alone["checkpoint"] |= {"resume": {"changed": ["objective"]}}
    ((kind, words),) = pools(1).errors(live_run, alone, ROWS)
    assert kind == "CheckpointMismatch"
    assert "the checkpoint has a critic, and this run has none (allow it with resume.drop)" in words


def other_tokenizer(place: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(place)


def small_vocabulary(place: Path) -> None:
    config = AutoConfig.for_model(KIND, **(COMMON | {"vocab_size": 20}), num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(place)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_tokenizer, "its tokenizer is not the policy's: they differ in 1 tokens"),
        (small_vocabulary, "the model's embedding has 20 rows"),
    ],
)
def test_a_critic_of_other_tokens_is_refused(
    pools: Any, places: tuple[Path, Path], tmp_path: Path, spoil: Any, words: str
) -> None:
    scorer().save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    spoil(tmp_path)

    errors = pools(2).errors(train, ppo((places[0], tmp_path)), ROWS, 1)

    assert errors[0] == errors[1]
    assert errors[0][0] == "ModelError"
    assert errors[0][1].startswith("The critic (section critic) cannot be built: ")
    assert words in errors[0][1]
