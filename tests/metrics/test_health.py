"""An alarm sounds on the series it is for, at the step where the series turns, and is silent on a healthy run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from holdfast.metrics.health import Health

FOLDER = Path(__file__).parent
Sounded = list[tuple[int, str]]


def sounded(series: Iterable[Mapping[str, float]], vocabulary: int | None = 64) -> tuple[Sounded, list[str]]:
    """Return (step, alarm) of all that sounded, and the sentences; ln 64 is 4.1589."""
    health = Health(vocabulary)
    found = [(step, name, text) for step, line in enumerate(series, 1) for name, text in health.see(step, line).items()]
    return [(step, name) for step, name, _ in found], [text for *_, text in found]


def column(name: str, *values: float) -> list[dict[str, float]]:
    return [{name: value} for value in values]


def recorded(name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def test_a_healthy_run_raises_no_alarm() -> None:
    """Recorded: examples/grpo_sort.yaml with metrics.entropy=true, reward 0.25 to 0.93."""
    assert sounded(recorded("healthy")) == ([], [])


def test_a_collapse_is_seen_within_steps() -> None:
    """Recorded: the same at a constant learning rate of 1e-3 with 16 prompts after 75% noise; reward 0 from step 3."""
    found, _ = sounded(recorded("collapse"))

    assert found == [(6, "flat_groups"), (9, "truncation"), (22, "flat_reward")]


def filtered(*at_rest: float) -> list[dict[str, float]]:
    counts = {"rollout/groups": 4.0, "rollout/trained_groups": 0.0, "frac_reward_zero_std": 0.25}
    return [line | counts for line in column("optim/no_gradient", *at_rest)]


def supervised(*losses: float) -> list[dict[str, float]]:
    return [line | {"mean_token_accuracy": 0.5} for line in column("loss", *losses)]


def compared(*looks: tuple[int, float]) -> list[dict[str, float]]:
    """Return ten steps for each comparison of the ranks, with it in the last one."""
    numbers = [{"ranks/slowest": float(rank), "ranks/slowest_ratio": ratio} for rank, ratio in looks]
    return [line for look in numbers for line in [*[{"loss": 1.0}] * 9, look]]


def rated(name: str, values: Iterable[float], rates: Iterable[float]) -> list[dict[str, float]]:
    return [{name: value, "learning_rate": rate} for value, rate in zip(values, rates, strict=True)]


def paired(*losses: float) -> list[dict[str, float]]:
    return [line | {"rewards/margins": 0.1} for line in column("loss", *losses)]


READ = {"data/rows": 8.0}
THROUGHPUT = "throughput/tokens_per_second"
CASES = [
    pytest.param(
        column("reward", *[0.1 * step for step in range(5)], *[0.5] * 20), [(25, "flat_reward")], id="reward flat"
    ),
    pytest.param(column("reward", *[0.5, 0.6] * 30), [], id="reward moves"),
    pytest.param(
        column("frac_reward_zero_std", 0.9, 0.9, 0.9, 0.9, 0.8, *[0.85] * 5),
        [(10, "flat_groups")],
        id="groups flat",
    ),
    pytest.param(column("frac_reward_zero_std", *[0.8] * 20), [], id="groups at the border"),
    pytest.param(filtered(1, 1, 1, 1, 0, 1, 1, 1, 1, 1), [(10, "nothing_learned")], id="all groups left out"),
    pytest.param([line | {"frac_reward_zero_std": 1.0} for line in filtered(1, 1)] * 2, [], id="rewards alike"),
    pytest.param(column("kto/desirable", 1, 1, 0, *[1] * 5), [(8, "one_sided")], id="answers of one kind"),
    pytest.param(column("kto/desirable", *[0.5] * 9), [], id="answers of both kinds"),
    pytest.param(
        column("completions/clipped_ratio", 0.9, 0.1, *[0.31] * 5), [(7, "truncation")], id="truncation lasts"
    ),
    pytest.param(column("completions/clipped_ratio", *[0.9, 0.9, 0.9, 0.9, 0.3] * 3), [], id="truncation passes"),
    pytest.param(column("entropy", 1.0, 0.1, *[0.009] * 5), [(7, "low_entropy")], id="entropy gone"),
    pytest.param(column("entropy", *[0.02] * 30), [], id="entropy low"),
    pytest.param(column("entropy_estimate", 1.0, *[0.009] * 5), [(6, "low_entropy")], id="estimate gone"),
    pytest.param(
        [{"entropy": 0.02, "entropy_estimate": 0.009}] * 30, [], id="estimate gone where the entropy is measured"
    ),
    pytest.param(column("kl", *[0.001] * 10, 0.011), [(11, "kl_jump")], id="KL jumps"),
    pytest.param(column("kl", *[0.0] * 10, 0.0099), [], id="KL starts"),
    pytest.param(column("kl", *[0.001] * 9, 1.0), [], id="KL, too few steps to know what is usual"),
    pytest.param(column("grad_norm", *[1.0, 2.0] * 10, 16.0), [(21, "gradient_spike")], id="gradient spikes"),
    pytest.param(column("grad_norm", *[1.0, 2.0] * 10, 14.0), [], id="gradient is large"),
    pytest.param(column("grad_norm", *[0.0] * 20, 1.0), [], id="gradient after flat groups"),
    pytest.param(column("grad_norm", *[0.1] * 10, 0.4, 1.1, 3.2, 9.0), [], id="gradient grows from step to step"),
    pytest.param(column("optim/no_gradient", 0, 1, 1, 1, 1, 1), [(6, "no_gradient")], id="gradient gone"),
    pytest.param(column("optim/no_gradient", *[1, 1, 1, 1, 0] * 4), [], id="gradient gone for a while"),
    pytest.param(column("nll", 4.2, *[4.1588831] * 9), [(10, "guessing")], id="loss of guessing"),
    pytest.param(column("nll", 3.0, 2.0, *[4.5] * 8), [(10, "guessing")], id="worse than guessing"),
    pytest.param(column("nll", *[4.2] * 9, 4.15), [], id="a random start that learns"),
    pytest.param(column("loss", *[9.0] * 20), [], id="another loss"),
    pytest.param(rated("nll", [4.3] * 20, range(20)), [], id="a random start in its warm-up"),
    pytest.param(rated("nll", [3.99] * 40, range(40)), [], id="a slow start in its warm-up"),
    pytest.param(column("nll", *[float("nan")] * 12), [], id="no number"),
    pytest.param(rated("nll", [4.3] * 20, [*range(18), 17, 17]), [(19, "guessing")], id="a warm-up that ends"),
    pytest.param(rated("nll", [4.0, *[4.3] * 11], range(12)), [(10, "guessing")], id="better before, in its warm-up"),
    pytest.param(column("entropy_estimate", 1.0, *[4.16] * 9), [(10, "guessing")], id="a policy that writes noise"),
    pytest.param(column("nll", *[0.5] * 9, *[1.51] * 5), [(14, "diverged")], id="loss three times its start"),
    pytest.param(column("nll", *[0.5] * 9, *[1.49] * 9), [], id="loss below three times its start"),
    pytest.param(column("nll", *[0.5] * 9, *[1.6, 1.6, 1.6, 1.6, 0.5] * 3), [], id="loss high for a while"),
    pytest.param(column("nll", *[0.01] * 9, *[0.1] * 9), [], id="a small loss"),
    pytest.param(column("nll", *[0.05] * 9, *[1.04] * 9), [], id="a small loss that stays below 1 more"),
    pytest.param(column("nll", *[0.05] * 9, *[1.06] * 5), [(14, "diverged")], id="a small loss that does not"),
    pytest.param(column("nll", 0.02, 8.0, *[1.1] * 4), [(6, "diverged")], id="broken by the first step"),
    pytest.param(column("nll", 0.02, *[0.9] * 30), [], id="a first batch that is easy"),
    pytest.param(column("nll", *[3.96] * 30), [(30, "guessing")], id="a loss that does not fall"),
    pytest.param(column("nll", *[3.96] * 29, 3.9, *[3.96] * 9), [], id="a loss that falls late"),
    pytest.param(paired(*[0.7] * 9, *[2.2] * 5), [(14, "diverged")], id="loss of pairs"),
    pytest.param(column("reward", *[0.5, 0.6] * 5, *[0.4, 0.49] * 5), [(20, "reward_fell")], id="reward falls"),
    pytest.param(column("reward", *[0.5, 0.6] * 5, *[0.4, 0.51] * 5), [], id="reward falls into its noise"),
    pytest.param(column("rewards/accuracies", *[0.4, 0.49] * 10), [(20, "wrong_order")], id="pairs exchanged"),
    pytest.param(column("rewards/accuracies", *[0.4, 0.5] * 10), [], id="pairs not told apart"),
    pytest.param(
        column("optim/skipped_steps", *[0] * 9, 1, 1, 2, 2, 3), [(14, "skipped_updates")], id="updates skipped"
    ),
    pytest.param(column("optim/skipped_steps", 7, *[7] * 9, 8, 9, *[9] * 25, 10), [], id="few updates skipped"),
    pytest.param(supervised(*[1.0] * 12, 3.1), [(13, "loss_spike")], id="loss spikes"),
    pytest.param(supervised(*[1.0] * 12, 2.9), [], id="loss is large"),
    pytest.param(column("loss", *[0.001] * 12, 0.5), [], id="a policy's loss"),
    pytest.param(column(THROUGHPUT, *[100.0] * 12, *[49.0] * 5), [(17, "slow")], id="throughput falls"),
    pytest.param(column(THROUGHPUT, *[100.0] * 12, *[49.0] * 4, *[51.0] * 9), [], id="throughput falls for a while"),
    pytest.param(column(THROUGHPUT, *[100.0] * 9, *[10.0] * 5), [], id="throughput, too few steps to know"),
    pytest.param(compared((1, 1.6), (1, 1.5)), [(20, "straggler")], id="a rank is slow twice"),
    pytest.param(compared((1, 1.6), (0, 1.6), (1, 1.6), (1, 1.4)), [], id="another rank each time"),
    pytest.param([READ | {"data/truncated": 1.0}], [(1, "cut_rows")], id="an eighth of the rows cut"),
    pytest.param([READ | {"data/truncated": 1.0}, *[READ] * 9], [(1, "cut_rows")], id="cut at first alone"),
    pytest.param([READ, READ | {"data/truncated": 1.0}], [], id="a sixteenth cut"),
    pytest.param([READ, READ | {"data/untrained": 2.0}], [(2, "cut_rows")], id="two of eighteen train nothing"),
    pytest.param([{"rollout/groups": 8.0, "data/overlong_dropped": 1.0}], [(1, "cut_rows")], id="a ninth of prompts"),
    pytest.param([READ | {"data/split": 8.0, "data/filtered": 9.0}], [], id="rows split lose nothing"),
]


@pytest.mark.parametrize(("series", "expected"), CASES)
def test_each_alarm_sounds_when_its_series_turns(series: list[dict[str, float]], expected: Sounded) -> None:
    assert sounded(series)[0] == expected


def test_without_a_vocabulary_nothing_is_compared_with_guessing() -> None:
    assert sounded(column("nll", *[9.0] * 30), vocabulary=None) == ([], [])


def test_reward_faults_above_a_percent_are_counted_by_kind() -> None:
    few = {"rollout/completions": 300.0, "reward/timeout": 1.0, "reward/error": 2.0, "reward/none": 50.0}
    many = few | {"reward/nan": 1.0}

    found, texts = sounded([few, many])

    assert found == [(2, "reward_faults")]
    assert texts[0].startswith("4 of 300 completions could not be scored (1 by timeout, 2 by error, 1 by nan).")


def test_rows_that_are_cut_or_left_out_are_counted_by_kind() -> None:
    _, texts = sounded([READ | {"data/truncated": 3.0, "data/untrained": 2.0}])

    assert texts == [
        "of the 10 rows of this step, 3 are longer than data.max_length and lose their end, 2 are left out since no "
        "token of them is trained. `holdfast data check` counts all rows and suggests lengths."
    ]


def test_an_alarm_rests_after_it_sounded() -> None:
    found, _ = sounded(column("completions/clipped_ratio", *[1.0] * 110))

    assert found == [(5, "truncation"), (55, "truncation"), (105, "truncation")]


def test_sentences_say_what_is_seen_and_what_to_try() -> None:
    texts = dict(zip(("flat_groups", "truncation", "flat_reward"), sounded(recorded("collapse"))[1], strict=True))

    assert texts["flat_groups"] == (
        "in 100% of the groups all completions have one reward, and for 5 steps it has been more than 80%. Such groups "
        "teach nothing. If the reward is not at its best, choose prompts that the policy solves sometimes, raise "
        "rollout.group_size, or set groups.flat: resample."
    )
    assert texts["truncation"].startswith("98% of the completions are cut at rollout.max_new_tokens, and for 5 steps")
    assert texts["flat_reward"].startswith("the reward has been 0 in each of the last 20 steps.")


def test_the_numbers_of_a_supervised_step_raise_none() -> None:
    line = {"loss": 2.0, "grad_norm": 1.0, "mean_token_accuracy": 0.5}

    assert sounded([line | {"loss": 2.0 - step / 50} for step in range(60)]) == ([], [])


def test_a_slow_run_is_told_with_the_phase_that_slows_it() -> None:
    fast = {THROUGHPUT: 1000.0, "timing/rollout": 1.0, "timing/reward": 0.1}
    slow = {THROUGHPUT: 300.0, "timing/rollout": 1.1, "timing/reward": 2.5}

    _, (text,) = sounded([*[fast] * 15, *[slow] * 5])

    assert "throughput has been below 50% of 1,000 tokens per second for 5 steps; it is 300." in text
    assert "Phase reward takes 2.5 s a step, and it took 0.1 s." in text


def test_a_straggler_is_named() -> None:
    _, (text,) = sounded(compared((3, 2.0), (3, 2.5)))

    assert text.startswith("rank 3 works 2.5 times as long as the rank in the middle")


@pytest.mark.parametrize("alarm", ["loss", "grad_norm", "kl"])
def test_steps_without_a_number_are_no_usual_value(alarm: str) -> None:
    health = Health()
    nan = {alarm: math.nan, "mean_token_accuracy": 0.5}

    alarms = [health.see(step, nan) for step in range(12)] + [health.see(12, nan | {alarm: 1.0})]

    assert not any(alarms)
