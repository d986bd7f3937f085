"""The math reward on answers written in many ways, and on GSM8K's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.config.sections.reward import MathConfig
from holdfast.errors import ConfigError
from holdfast.rewards.functions.mathematics import MathReward
from tests.rewards.conftest import Start, sample, user

pytest.importorskip("math_verify")

FINDS_NEIGHBOURS_FIRST = """
    import sys
    from pathlib import Path
    sys.path.insert(0, str(Path(__file__).parent))
    def reward(completion): return 1
"""


@pytest.fixture(scope="module")
def reward() -> MathReward:
    return MathReward.checked("answer", "math")


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("The sum is 42.", "42", 1.0),
        ("#### 42", "It is 6*7 = <<6*7=42>>42.\n#### 42", 1.0),
        ("#### $1,234 dollars", "#### 1,234", 1.0),
        ("#### 41", "#### 42", 0.0),
        ("#### 421", "42", 0.0),
        (r"So \boxed{\frac{1}{2}} it is", "0.5", 1.0),
        (r"\boxed{\dfrac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"First \boxed{3}, no, \boxed{4}", "4", 1.0),
        (r"First \boxed{4}, no, \boxed{3}", "4", 0.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (r"\boxed{(1, 2)}", "(2, 1)", 0.0),
        ("#### -3", "-3", 1.0),
        ("#### 3", "-3", 0.0),
        ("#### 42.0", "42", 1.0),
        ("42 is not the answer; it is 43", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
        (r"\boxed{42", "42", 0.0),  # cut off; it may have become 421
        ("####", "42", 0.0),
    ],
)
def test_the_final_answer_counts_however_it_is_written(
    reward: MathReward, completion: str, gold: str, expected: float
) -> None:
    assert reward(sample(completion, 0, answer=gold)) == expected


@pytest.mark.parametrize(("gold", "right"), [(42, "42"), (42.0, "42"), (0.5, r"\frac{1}{2}"), (0, "0")])
def test_a_gold_answer_may_be_a_number(reward: MathReward, gold: float, right: str) -> None:
    assert reward(sample(rf"\boxed{{{right}}}", 0, answer=gold)) == 1.0
    assert reward(sample(r"\boxed{43}", 0, answer=gold)) == 0.0


def test_a_gold_that_cannot_be_read_scores_nothing(reward: MathReward) -> None:
    assert reward(sample("#### 42", 0, answer="")) is None


def test_gsm8k_gold_answers_score_1_and_wrong_ones_0(gsm8k: Path, start: Start) -> None:
    rows = [json.loads(line) for line in gsm8k.read_text(encoding="utf-8").splitlines()[:200]]
    pool = start("", MathConfig())
    golds = [row["answer"].rpartition("#### ")[2].replace(",", "") for row in rows]

    written = pool.score([sample(row["answer"], i, **row) for i, row in enumerate(rows)])
    spelled = pool.score([sample(f"So it is ${gold}.0$.", i, **rows[i]) for i, gold in enumerate(golds)])
    wrong = pool.score([sample(f"#### {int(gold) + 1}", i, **rows[i]) for i, gold in enumerate(golds)])

    assert [each.reward for each in written] == [1.0] * 200
    assert [each.reward for each in spelled] == [1.0] * 200
    assert [each.reward for each in wrong] == [0.0] * 200


@pytest.mark.parametrize(
    ("options", "earned"),
    [({}, 0.0), ({"on_timeout": "drop_sample"}, None), ({"on_timeout": -1.0}, -1.0)],
)
def test_an_answer_that_cannot_be_computed_in_time_is_wrong(
    start: Start, options: dict[str, object], earned: float | None
) -> None:
    """math-verify's own alarm is off; nothing but the supervisor could end this."""
    pool = start("", MathConfig(), timeout_seconds=1, **options)

    endless, good = pool.score([sample(r"\boxed{9^{9^{9^{9}}}}", 0, answer="9"), sample("#### 4", 1, answer="4")])

    assert (endless.reward, endless.fault, endless.drop) == (earned, "timeout", "sample" if earned is None else None)
    assert good.reward == 1.0


def test_an_answer_that_had_no_turn_is_dropped_and_not_wrong(start: Start) -> None:
    pool = start("", MathConfig(), timeout_seconds=20, step_timeout_seconds=1)

    (endless,) = pool.score([sample(r"\boxed{9^{9^{9^{9}}}}", 0, answer="9")])

    assert (endless.reward, endless.fault, endless.drop) == (None, "timeout", "sample")


def test_another_reward_that_is_late_drops_its_sample(start: Start) -> None:
    pool = start("import time\ndef reward(completion): time.sleep(60)", timeout_seconds=1)

    (late,) = pool.score([sample()])

    assert (late.reward, late.drop) == (None, "sample")


def test_a_missing_library_is_told_with_the_command_that_installs_it(start: Start, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such thing here')\n")

    with pytest.raises(ConfigError, match=r"kind math needs math-verify.*pip install 'holdfast\[math\]'"):
        start(FINDS_NEIGHBOURS_FIRST, user(), MathConfig())


def test_a_library_that_calls_right_answers_wrong_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("parse = lambda *_, **__: [1]\nverify = lambda *_, **__: False\n")

    with pytest.raises(ConfigError, match="says that half of x is not 0.5x"):
        start(FINDS_NEIGHBOURS_FIRST, user(), MathConfig())
