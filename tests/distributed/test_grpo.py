"""A policy's step is the paper's, whatever the split; and it makes no forward pass that its loss does not need."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.files import size_words
from holdfast.parallel.failure.channel import FailureChannel
from holdfast.parallel.mesh import World
from holdfast.training.rollout_memory import free_bytes
from tests.distributed.grpo_cases import (
    answers_of_a_batch,
    by_hand,
    columns_of_a_mixture,
    leave_and_make_again,
    memory_of_sampling,
    prompts_of,
    remax,
    sample_of_no_numbers,
    settings,
    train,
    train_and_publish_averages,
)
from tests.tiny import tiny_directory, tiny_model

ROWS = prompts_of(12)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


SHARED_PROMPT = 2e-8
"""Where a prompt is forwarded once, llama's norms, which are float32 in a float64 model too, round the sum of its
completions' gradients; where it is repeated, each gradient alone, as the oracle does."""


def one_prompt_for_all(tree: dict[str, Any]) -> bool:
    return tree["rollout"].get("shared_prefix") != "off" and tree["data"].get("packing") != "none"


SPLITS = [
    pytest.param(1, {}, id="1 rank"),
    pytest.param(1, {"rollout": {"shared_prefix": "off"}}, id="1 rank, prompts repeated"),
    pytest.param(1, {"data": {"packing": "none"}}, id="1 rank, padded, transformers' generate"),
    pytest.param(2, {}, id="2 ranks"),
    pytest.param(2, {"data": {"tokens_per_micro_batch": 48}}, id="2 ranks, groups cut over packs"),
    pytest.param(2, {"rollout": {"rows": 5}}, id="2 ranks, few rows decoded together"),
    pytest.param(4, {"parallel": {"replicate": 2}}, id="2 copies of 2 ranks"),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("ranks", "changes"), SPLITS)
def test_every_split_makes_the_updates_of_the_paper(
    pools: Any, llama: Path, ranks: int, changes: dict[str, Any]
) -> None:
    tree = settings(str(llama))
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values

    found = pools(ranks).run(train, tree, ROWS)[0]
    expected = by_hand(tiny_model("llama", tie_word_embeddings=True).double(), found["sampled"], lr=0.5)

    losses, norms = ([line[name] for line in found["lines"]] for name in ("loss", "grad_norm"))
    rounding = SHARED_PROMPT if one_prompt_for_all(tree) else 1e-10
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-10)  # near 0: advantages sum to 0
    np.testing.assert_allclose(norms, expected["norms"], rtol=rounding)
    assert set(found["parameters"]) == set(expected["parameters"])
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, rtol=0, atol=rounding, err_msg=name)


def test_a_prompt_is_shared_by_itself_only_where_that_saves_work(pools: Any, llama: Path) -> None:
    """7 to 15 prompt tokens, and 80 of each completion: side by side, that is more work than to repeat the prompts."""

    def fill(shared: str, new_tokens: int) -> float:
        rollout = {"group_size": 4, "max_new_tokens": new_tokens, "shared_prefix": shared}
        tree = settings(str(llama), rollout=rollout, data={"max_length": 112, "tokens_per_micro_batch": 2048})
        return float(pools(1).run(train, tree, ROWS, 1)[0]["lines"][0]["data/fill"])

    short = {shared: fill(shared, 4) for shared in ("on", "auto", "off")}
    long = {shared: fill(shared, 80) for shared in ("on", "auto", "off")}

    assert short["on"] == short["auto"] < short["off"]
    assert long["on"] < long["auto"] <= long["off"]


@pytest.mark.slow
def test_what_is_sampled_does_not_depend_on_the_number_of_ranks(pools: Any, llama: Path) -> None:
    one, two, four = (pools(ranks).run(train, settings(str(llama)), ROWS)[0]["sampled"] for ranks in (1, 2, 4))

    assert [[item[:4] for item in step] for step in one] == [[item[:4] for item in step] for step in two]
    assert [[item[:4] for item in step] for step in one] == [[item[:4] for item in step] for step in four]
    assert len({item[2] for step in one for item in step}) > 40, "completions must differ"


def laid_out(model: Any) -> int:
    """Return the numbers in a llama's seven matrices per block and in its output layer, by hand."""
    config = model.config
    width, inner, keys = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    block = 2 * width * width + 2 * width * keys + 3 * width * inner
    return int(config.num_hidden_layers * block + config.vocab_size * width)


@pytest.mark.parametrize(
    ("ranks", "engine", "copied", "laid"),
    [
        pytest.param(2, "inprocess", 1.0, True, id="shards: a copy, and its matrices anew"),
        pytest.param(2, "transformers", 1.0, False, id="shards, transformers' generate: a copy"),
        pytest.param(1, "inprocess", 0.0, True, id="whole weights: their matrices anew"),
        pytest.param(1, "transformers", 0.0, False, id="whole weights, transformers' generate: nothing"),
    ],
)
def test_weights_to_sample_over_that_have_no_room_are_refused_before_step_1(
    pools: Any, llama: Path, ranks: int, engine: str, copied: float, laid: bool
) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    numbers = copied * sum(value.numel() for value in model.parameters()) + laid * laid_out(model)
    gib = 8 * numbers / 2**30  # float64

    pools(ranks).run(train, settings(str(llama), rollout={"engine": engine, "copy_gib": 1.001 * gib or 1e-9}), ROWS, 1)
    if numbers:
        tree = settings(str(llama), rollout={"engine": engine, "copy_gib": 0.999 * gib})
        for rank, (kind, message) in enumerate(pools(ranks).errors(train, tree, ROWS, 1)):
            assert kind == "ConfigError"
            assert f"sampling takes {size_words(gib * 2**30)} on every rank" in message, rank
            assert "and rank 0 may take" in message, rank


def test_sampling_takes_what_the_check_counts(pools: Any, tmp_path: Path) -> None:
    """By the allocator's own count; a MiB for two tensors on their way, keys and values."""
    tree = settings(str(tiny_directory(tmp_path, "llama", intermediate_size=4096, num_hidden_layers=4)))

    most, counted = pools(2).run(memory_of_sampling, tree, ROWS)[0]

    assert counted > 18 * 2**20
    assert counted <= most < counted + 3 * 2**20


def test_what_is_free_is_what_the_system_says_shared_by_the_ranks_of_a_machine() -> None:
    told = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
    channel = FailureChannel(torch.distributed.HashStore(), 0, 4)
    alone, one_of_four = (World(0, 4, 0, torch.device("cpu"), channel, local_size=size) for size in (None, 4))

    assert free_bytes(alone) == pytest.approx(int(told) * 1024, rel=0.1)
    assert free_bytes(one_of_four) == pytest.approx(free_bytes(alone) / 4, rel=0.1)


@pytest.mark.slow
def test_the_reward_rises(pools: Any, llama: Path) -> None:
    tree = settings(str(llama), steps=25, rollout={"group_size": 8, "max_new_tokens": 8}, optim={"lr": 3.0})

    lines = pools(2).run(train, tree, ROWS, 25)[0]["lines"]

    assert np.mean([line["reward"] for line in lines[:3]]) < 0.62
    assert np.mean([line["reward"] for line in lines[-3:]]) > 0.85


@pytest.mark.parametrize(
    ("sections", "policy", "reference"),
    [
        pytest.param({}, 1, 0, id="on-policy: the update's own forward and no other"),
        pytest.param({"kl": {"coefficient": 0.1}}, 1, 1, id="KL: one of the reference"),
        pytest.param({"updates": {"passes": 2}}, 3, 0, id="two passes: one for the proximal policy"),
        pytest.param({"updates": {"mini_batches": 2}}, 4, 0, id="two mini-batches: one each, and one before each"),
        pytest.param({"correction": {"kind": "truncate"}}, 1, 0, id="correction on-policy: none"),
        pytest.param({"entropy": {"top_quantile": 0.5}}, 2, 0, id="tokens of high entropy: one to know them"),
    ],
)
def test_forward_passes_are_those_the_loss_needs(
    pools: Any, llama: Path, sections: dict[str, Any], policy: int, reference: int
) -> None:
    found = pools(2).run(train, settings(str(llama), **sections), ROWS, 2)

    for outcome in found:
        assert outcome["forwards"] == [{"policy": policy, "reference": reference}] * 2


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(pools: Any, llama: Path) -> None:
    for line in pools(2).run(train, settings(str(llama)), ROWS)[0]["lines"]:
        assert line["clip_ratio/region_mean"] == 0.0
        assert line["ratio/deviation_mean"] == 0.0
        assert line["sampling/sampling_logp_difference/mean"] < 1e-5


def test_several_passes_start_from_ratio_one_and_then_leave_it(pools: Any, llama: Path) -> None:
    tree = settings(str(llama), updates={"passes": 2}, optim={"lr": 0.5})

    found = pools(2).run(train, tree, ROWS, 2)[0]

    assert all(1e-5 < line["ratio/deviation_mean"] < 0.5 for line in found["lines"])
    assert found["state"]["updates"] == 4
    assert found["state"]["step"] == 2


def test_the_reference_starts_as_the_policy_and_stays(pools: Any, llama: Path) -> None:
    tree = settings(str(llama), kl={"coefficient": 0.1}, optim={"lr": 3.0})

    lines = pools(2).run(train, tree, ROWS)[0]["lines"]

    assert lines[0]["kl"] == 0.0
    assert 1e-6 < lines[1]["kl"] < lines[2]["kl"]


def test_a_step_of_flat_groups_runs_and_trains_nothing(pools: Any, llama: Path) -> None:
    tree = settings(str(llama), groups={"flat": "drop"})
    start = tiny_model("llama", tie_word_embeddings=True).double().state_dict()

    found = pools(2).run(train, tree, ROWS, 2, "flat")[0]

    for line in found["lines"]:
        assert line["frac_reward_zero_std"] == 1.0
        assert line["rollout/trained_groups"] == 0.0
        assert (line["loss"], line["grad_norm"]) == (0.0, 0.0)
    for name, parameter in found["parameters"].items():
        np.testing.assert_array_equal(parameter, start[name].numpy(), err_msg=name)


def test_advantages_of_the_user_s_own_see_what_ours_see_on_all_ranks(pools: Any, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n"
        "def weighted(groups, power):\n"
        "    assert (groups.rewards == groups.parts['exact']).all()\n"
        "    weights = groups.lengths ** power\n"
        "    return groups.rewards - (weights * groups.rewards).sum(1, keepdims=True) / weights.sum(1, keepdims=True)\n"
    )
    path = {"kind": "path", "path": f"{tmp_path}/own.py:weighted", "kwargs": {"power": 1}}

    ours, own = (
        pools(2).run(train, settings(str(llama), advantage=advantage), ROWS, 2)[0]
        for advantage in ({"kind": "opo"}, path)
    )

    assert ours["sampled"] == own["sampled"]
    assert all(line["grad_norm"] > 0 for line in own["lines"])
    for name, parameter in ours["parameters"].items():
        np.testing.assert_allclose(own["parameters"][name], parameter, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_tokens_chosen_by_their_covariance_are_the_same_however_they_are_split(
    pools: Any, llama: Path, kind: str
) -> None:
    choice = {"covariance_low": 0.01, "covariance_high": 9.0} if kind == "clip_cov" else {"coefficient": 0.3}
    changes = {"objective": {"kind": kind, "share": 0.1, **choice}, "updates": {"mini_batches": 2}}
    tree = settings(str(llama), **changes)
    plain = settings(str(llama), **changes | {"objective": {"kind": "clip"}})

    whole = pools(1).run(train, tree, ROWS, 2)[0]
    split = pools(2).run(train, tree | {"data": tree["data"] | {"tokens_per_micro_batch": 48}}, ROWS, 2)[0]
    other = pools(1).run(train, plain, ROWS, 2)[0]

    shares = [line["covariance/chosen_mean"] for line in whole["lines"]]
    assert all(0.05 < share <= 0.1 for share in shares)
    assert shares == pytest.approx([line["covariance/chosen_mean"] for line in split["lines"]], abs=1e-12)
    for name, parameter in whole["parameters"].items():
        np.testing.assert_allclose(split["parameters"][name], parameter, rtol=0, atol=SHARED_PROMPT, err_msg=name)
    assert any(np.abs(whole["parameters"][name] - value).max() > 1e-6 for name, value in other["parameters"].items())


def test_flat_groups_are_sampled_again_up_to_the_cap(pools: Any, llama: Path) -> None:
    tree = settings(str(llama), groups={"flat": "resample", "max_rounds": 3})

    found = pools(2).run(train, tree, ROWS, 1, "flat")[0]["lines"][0]

    assert found["rollout/rounds"] == 3.0
    assert found["rollout/groups"] == 12.0
    assert found["rollout/trained_groups"] == 0.0


@pytest.mark.parametrize(("excess", "drawn"), [(1.0, [4, 2, 1, 1]), (1.5, [6, 2]), (2.0, [8]), (3.0, [12])], ids=str)
def test_prompts_drawn_in_excess_fill_the_batch_in_fewer_rollouts(
    pools: Any, llama: Path, excess: float, drawn: list[int]
) -> None:
    """Every second prompt teaches something: of 4 wanted groups 2 are missing after 4 prompts, and so on."""
    tree = settings(str(llama), groups={"flat": "resample", "oversample": excess})

    found = pools(2).run(train, tree, ROWS, 1, "even_share_of_odd_prompts")[0]

    assert [len({item[0] // 2**20 for item in round_}) for round_ in found["sampled"]] == drawn
    assert found["lines"][0]["rollout/rounds"] == len(drawn)
    assert found["lines"][0]["rollout/groups"] == sum(drawn)
    assert found["lines"][0]["rollout/trained_groups"] == 4.0


def test_more_prompts_than_a_pass_holds_may_be_asked_for(pools: Any, llama: Path) -> None:
    """12 rows, 16 wanted at once: what the pass lacks is asked of the next one, as it is missing then."""
    tree = settings(str(llama), groups={"flat": "resample", "oversample": 4.0, "max_rounds": 2})

    found = pools(2).run(train, tree, ROWS, 1, "flat")[0]

    assert [len({item[0] for item in round_}) for round_ in found["sampled"]] == [4 * 12, 4 * 12]


def test_a_step_that_is_left_while_it_is_sampled_is_made_again_exactly(pools: Any, llama: Path) -> None:
    straight = pools(2).run(train, settings(str(llama)), ROWS, 2)[0]["sampled"]

    for found in pools(2).run(leave_and_make_again, settings(str(llama)), ROWS):
        assert (found["left"], found["stream"], found["step"], found["scored"]) == (True, True, 1, 1)
        expected = [[(item[0], item[2]) for item in step] for step in straight]
        assert found["sampled"] == expected


def test_a_policy_without_numbers_is_not_sampled_from(pools: Any, llama: Path) -> None:
    first, second = pools(2).run(sample_of_no_numbers, settings(str(llama)), ROWS)

    assert first == second
    assert "are not finite (NaN) for 4 prompts of step 1, the first one prompt 0" in first


def test_a_reward_without_a_number_leaves_baseline_and_average(pools: Any, llama: Path) -> None:
    """The first completion of each group is not scored: it trains nothing, and the others compare among themselves."""
    found = pools(2).run(train, settings(str(llama)), ROWS, 1, "even_share_but_first")[0]
    step = [item for item in found["sampled"][0] if item[0] % 2**20 != 0]

    expected = by_hand(tiny_model("llama", tie_word_embeddings=True).double(), [step], lr=0.5)

    assert len(step) == 12
    np.testing.assert_allclose(found["lines"][0]["grad_norm"], expected["norms"][0], rtol=SHARED_PROMPT)


@pytest.mark.parametrize("dropping", ["sample", "group", None])
def test_a_greedy_completion_that_cannot_be_scored_follows_the_declared_policy(
    pools: Any, llama: Path, dropping: str | None
) -> None:
    """Without the baseline of a prompt its group is left out, of advantages and of the average; 0 is a baseline."""
    tree = settings(str(llama), advantage={"kind": "remax"})

    found = pools(2).run(remax, tree, ROWS, dropping)

    assert sorted(found[0]["greedy"]) == ([0, 2, 3] if dropping else [0, 1, 2, 3])
    assert found[0]["metrics"]["reward/timeout"] == 1.0
    assert found[0]["metrics"]["rollout/trained_groups"] == len(found[0]["greedy"])
    assert found[0]["metrics"]["rollout/completions"] == 16.0
    assert [line for line in found[0]["said"] if "too long" in line]
    assert dropping or found[0]["greedy"][1] == 0.0
    compared = {sample: values for rank in found for sample, values in rank["advantages"].items()}
    assert len(compared) == 4 * len(found[0]["greedy"])
    for sample, (reward, advantage) in compared.items():
        assert advantage == pytest.approx(reward - found[0]["greedy"][sample // 2**20], abs=1e-12)


def test_momentum_does_not_move_a_policy_that_learned_nothing(pools: Any, llama: Path) -> None:
    """Two steps that teach, then two in which every reward is the same: Adam would go on."""
    adam = {"kind": "adamw", "lr": 0.01, "schedule": "constant"}
    tree = settings(str(llama), steps=4, optim=adam | {"clip_norm": None})

    taught = pools(2).run(train, tree, ROWS, 2, "flat_from_the_third_step")[0]
    found = pools(2).run(train, tree, ROWS, 4, "flat_from_the_third_step")[0]

    assert [line["optim/no_gradient"] for line in found["lines"]] == [0.0, 0.0, 1.0, 1.0]
    for name, parameter in taught["parameters"].items():
        np.testing.assert_array_equal(found["parameters"][name], parameter, err_msg=name)


def test_metrics_of_a_step_speak_of_its_tokens_however_few_groups_are_left(pools: Any, llama: Path) -> None:
    """One group of four is not flat: with four mini-batches there is one update, and no zeros are averaged in."""
    tree = settings(str(llama), groups={"flat": "drop"}, metrics={"entropy": True})

    one = pools(2).run(train, tree, ROWS, 1, "even_share_of_one_prompt")[0]
    four = pools(2).run(train, tree | {"updates": {"mini_batches": 4}}, ROWS, 1, "even_share_of_one_prompt")[0]

    assert one["lines"][0]["rollout/trained_groups"] == four["lines"][0]["rollout/trained_groups"] == 1.0
    assert four["state"]["updates"] == 1
    assert four["lines"][0]["entropy"] == pytest.approx(one["lines"][0]["entropy"], rel=1e-10)
    assert four["lines"][0]["entropy"] > 2.0


def test_the_estimate_of_the_entropy_is_the_mean_of_minus_log_p_over_sampled_tokens(pools: Any, llama: Path) -> None:
    tree = settings(str(llama), rollout={"group_size": 4, "max_new_tokens": 10, "temperature": 0.7})
    biased = tree | {"rollout": tree["rollout"] | {"top_p": 0.9}, "correction": {"kind": "truncate"}}
    model = tiny_model("llama", tie_word_embeddings=True).double()

    found = pools(2).run(train, tree | {"groups": {"flat": "drop"}}, ROWS, 1)[0]
    restricted = pools(2).run(train, biased, ROWS, 1)[0]

    nlls = []
    for _, prompt, completion, *_ in found["sampled"][0]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.7
        nlls += torch.nn.functional.cross_entropy(logits, torch.tensor(completion), reduction="none").tolist()
    assert found["lines"][0]["entropy_estimate"] == pytest.approx(np.mean(nlls), rel=1e-6)
    assert "entropy" not in found["lines"][0]
    assert "entropy_estimate" not in restricted["lines"][0]


def test_what_a_step_without_a_trained_token_cannot_measure_is_not_there(pools: Any, llama: Path) -> None:
    """Controllers must not take an absent entropy or KL for zero."""
    targets = {"kl": {"coefficient": 0.05, "target": 0.1}, "entropy": {"coefficient": 0.01, "target": 3.0}}
    tree = settings(str(llama), groups={"flat": "drop"}, **targets)

    found = pools(2).run(train, tree, ROWS, 2, "flat")[0]

    for line in found["lines"]:
        assert "kl" not in line
        assert "entropy" not in line
        assert (line["kl/coefficient"], line["entropy/coefficient"]) == (0.05, 0.01)


def test_a_context_longer_than_the_model_s_positions_is_refused(pools: Any, llama: Path) -> None:
    tree = settings(str(llama), data={"max_length": 400})

    errors = pools(2).errors(train, tree, ROWS)

    assert {kind for kind, _ in errors} == {"ConfigError"}
    assert "data.max_length allows sequences of 400 tokens, and llama has 128 positions" in errors[0][1]


def test_a_mixed_storage_policy_has_a_twin_for_its_reference(pools: Any, llama: Path) -> None:
    tree = settings(str(llama), kl={"coefficient": 0.1}, optim={"lr": 2.0})
    tree["model"] |= {"dtype": "float32", "frozen_dtype": "bfloat16", "freeze": [r"layers\.0\."]}

    lines = pools(2).run(train, tree, ROWS, 2)[0]["lines"]

    assert lines[0]["kl"] == 0.0
    assert lines[1]["kl"] > 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rollouts_after_an_evaluation_of_averages_are_drawn_from_the_weights(
    pools: Any, llama: Path, ranks: int, lora: dict[str, Any] | None
) -> None:
    tree = settings(
        str(llama), steps=4, model={"lora": lora}, optim={"lr": 5.0, "ema": {"decay": 0.9, "evaluate": True}}
    )

    plain, evaluated = (
        pools(ranks).run(partial(train_and_publish_averages, between=between), tree, ROWS + ROWS)
        for between in (False, True)
    )

    assert evaluated == plain


@pytest.mark.slow
def test_gold_answers_that_cannot_be_read_are_counted_before_step_1(pools: Any, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    for name, answers in (("some", ["1", "", r"\\$4", "4"]), ("none", ["", "", r"\\boxed{}", ""])):
        rows = (f'{{"prompt": "add {n}=", "answer": "{answer}"}}' for n, answer in enumerate(answers))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    some, none = (
        settings(str(llama), reward="math", data={"path": str(tmp_path / f"{name}.jsonl"), "shuffle": False})
        for name in ("some", "none")
    )

    said = pools(2).run(answers_of_a_batch, some)
    errors = pools(2).errors(answers_of_a_batch, none)

    assert said[0] == said[1]
    assert said[0][0].startswith(
        "warning: reward math cannot read 1 of 4 answers of the first batch (column answer): ''. It scores no "
    )
    assert errors[0] == errors[1]
    assert "reward math cannot read 4 of 4 answers of the first batch (column answer): ''" in errors[0][1]


def test_a_column_of_one_source_may_come_after_the_first_batch(pools: Any, llama: Path, tmp_path: Path) -> None:
    """A row of the small source is not in the first batch of four; alone, the large one is refused."""
    (tmp_path / "many.jsonl").write_text("\n".join(f'{{"prompt": "add {n}="}}' for n in range(60)))
    (tmp_path / "few.jsonl").write_text('{"prompt": "add 1=", "answer": "1"}\n')
    sources = [{"path": str(tmp_path / name)} for name in ("many.jsonl", "few.jsonl")]
    tree = settings(str(llama), data={"path": None, "sources": sources, "shuffle": False})

    said = pools(2).run(columns_of_a_mixture, tree)
    errors = pools(2).errors(columns_of_a_mixture, settings(str(llama), data=sources[0]))

    assert said[0] == ["warning: reward exact needs column answer, and no row of the first batch has one."]
    assert errors[0] == errors[1]
    assert "reward exact: it needs column answer, and no row of the first batch has one" in errors[0][1]
