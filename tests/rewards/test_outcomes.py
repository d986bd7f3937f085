"""What a function may return, and what becomes of everything else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.rewards.pool import RewardPool
from tests.rewards.conftest import Start, sample, samples, started, user

RETURNS = """
    def reward(value):
        return eval(value, {"np": __import__("numpy")} if "np" in value else {})
"""


@pytest.fixture(scope="module")
def returns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    """Return a pool whose reward is what its row says; one for all rows, whatever they make of it."""
    with started(tmp_path_factory.mktemp("returns")) as start:
        yield start(RETURNS)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", 1.0), ("0.25", 0.25), ("True", 1.0), ("-3", -3.0), ("np.float32(0.5)", 0.5), ("np.int64(2)", 2.0),
        ("np.bool_(True)", 1.0), ("np.array(1.5)", 1.5), ("{'score': 1, 'reward': 2}", 2.0), ("{'overall': 3}", 3.0),
    ],
)  # fmt: skip
def test_a_number_of_any_kind_is_a_reward(returns: RewardPool, value: str, expected: float) -> None:
    found = returns.score([sample("text", 0, value=value)])[0]

    assert (found.reward, found.fault, found.drop, found.message) == (expected, None, None, "")
    assert isinstance(found.reward, float)


@pytest.mark.parametrize(
    ("value", "fault", "said"),
    [
        ("'good'", "error", "returned a str 'good'; a reward is a number, None or a dict"),
        ("'1.0'", "error", "returned a str '1.0'"),
        ("[1.0]", "error", "returned a list; a reward is a number, None or a dict"),
        ("np.array([1.0, 2.0])", "error", "returned a ndarray"),
        ("1j", "error", "returned a complex"),
        ("{}", "error", "a dict without the key reward, overall or score (its keys: none)"),
        ("{'value': 1}", "error", "(its keys: value)"),
        ("{'reward': 'x'}", "error", "returned a str 'x'"),
        ("float('nan')", "nan", "returned nan"),
        ("float('inf')", "nan", "returned inf"),
        ("10 ** 400", "nan", "returned inf"),
        ("-2e30", "nan", "returned -2e+30, and rewards lie within +-1e30"),
        ("np.float64('nan')", "nan", "returned nan"),
        ("{'reward': float('nan')}", "nan", "returned nan"),
        ("None", "none", "returned None"),
        ("{'reward': None}", "none", "returned None"),
        ("1 / 0", "error", "raised ZeroDivisionError: division by zero (my.py:3)"),
        ("exit(3)", "error", "raised SystemExit: 3 (my.py:3)"),
        ("(_ for _ in ()).throw(KeyboardInterrupt)", "error", "raised KeyboardInterrupt"),
    ],
)
def test_anything_else_is_a_fault_that_says_what_and_where(
    returns: RewardPool, value: str, fault: str, said: str
) -> None:
    found = returns.score([sample("A long answer. " * 20, 31, value=value)])[0]

    assert (found.reward, found.fault, found.drop) == (None, fault, "sample")
    assert found.message.startswith("reward reward ")
    assert said in found.message
    assert f"; sample 31: '{('A long answer. ' * 20)[:77]}...'" in found.message


BATCHED = """
    def reward(completions, value):
        import numpy as np, torch
        return eval(value[0])
"""
FOR_ALL = "; a batched reward returns a list with one value for each"
LISTS = [
    ("[1.0]", f"returned 1 value for 3 completions{FOR_ALL}"),
    ("[1.0, 2.0]", f"returned 2 values for 3 completions{FOR_ALL}"),
    ("[1.0] * 4", f"returned 4 values for 3 completions{FOR_ALL}"),
    ("[]", "returned 0 values for 3 completions"),
    ("1.0", "returned a float for 3 completions"),
    ("None", "returned None for 3 completions"),
    ("'0.5'", "returned a str '0.5' for 3 completions"),
    ("'abc'", "returned a str 'abc' for 3 completions"),
    ("(1.0 for _ in range(3))", "returned a generator for 3 completions"),
    ("{'reward': [1.0, 1.0, 1.0]}", "returned a dict for 3 completions"),
    ("{1.0, 2.0, 3.0}", "returned a set for 3 completions"),
    ("np.float32(1.0)", "returned a float32 for 3 completions"),
    ("np.array([[1.0, 2.0, 3.0]])", "returned 1 value for 3 completions"),
    ("torch.ones(2)", "returned 2 values for 3 completions"),
    ("np.ones((3, 1))", "returned a list; a reward is a number, None or a dict"),
    ("[[1.0], [2.0], [3.0]]", "returned a list; a reward is a number, None or a dict"),
    ("['1', '2', '3']", "returned a str '"),
]


@pytest.fixture(scope="module")
def returns_lists(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    """Return a pool whose batched reward is what the first row says."""
    with started(tmp_path_factory.mktemp("lists")) as start:
        yield start(BATCHED)


@pytest.mark.parametrize(("value", "said"), LISTS)
def test_what_is_not_one_value_for_each_completion_is_an_error_of_all(
    returns_lists: RewardPool, value: str, said: str
) -> None:
    of_three = samples("a", "b", "c", value=value)

    outcomes = returns_lists.try_out(of_three)["reward"]
    found = returns_lists.score(of_three)

    assert [(each.reward, each.fault, each.drop) for each in found] == [(None, "error", "sample")] * 3
    assert all(said in each.message for each in found)
    assert all(outcome.is_malformed for outcome in outcomes)


@pytest.mark.parametrize(
    "value",
    [
        "[1, 0.5, True]", "(1, 0.5, 1)", "np.array([1, 0.5, 1])", "torch.tensor([1, 0.5, 1])",
        "np.array([2, 1, 2]) / 2", "[np.float32(1), np.array([0.5]), torch.ones(1)]",
        "[{'score': 1}, {'reward': 0.5}, 1]",
        "torch.tensor([1, 0.5, 1], dtype=torch.bfloat16, requires_grad=True)",
    ],
)  # fmt: skip
def test_one_value_for_each_completion_is_its_reward(returns_lists: RewardPool, value: str) -> None:
    found = returns_lists.score(samples("a", "b", "c", value=value))

    assert [(each.reward, each.fault) for each in found] == [(1.0, None), (0.5, None), (1.0, None)]


def test_a_bad_value_in_a_list_is_that_of_its_completion(returns_lists: RewardPool) -> None:
    of_four = samples("a", "b", "c", "d", value="[float('nan'), None, 'x', 1]")

    found = returns_lists.score(of_four)

    assert [(each.reward, each.fault) for each in found] == [
        (None, "nan"),
        (None, "none"),
        (None, "error"),
        (1.0, None),
    ]
    assert [each.is_malformed for each in returns_lists.try_out(of_four)["reward"]] == [False, False, True, False]


def test_parts_and_metrics_of_a_dict_keep_their_names(start: Start) -> None:
    pool = start("""
        def reward(completion):
            return {"overall": 0.5, "format": True, "accuracy": 0, "missing": None, "said": "text", "odd": float("nan"),
                    "metrics": {"steps": 4, "bad": float("nan"), "text": "x"}}
        """, user(name="r", weight=2.0))  # fmt: skip

    found = pool.score([sample()])[0]

    assert found.reward == 1.0
    assert found.parts == {"r": 0.5, "r/format": 1.0, "r/accuracy": 0.0, "r/missing": None, "r/odd": None}
    assert found.metrics == {"r/steps": 4.0}


SEVERAL = """
    def number(completion): return 2
    def nothing(completion): return None
    def nan(completion): return float("nan")
    def fails(completion): raise OSError("no")
"""


def test_the_reward_is_the_weighted_sum(start: Start) -> None:
    pool = start("def a(completion): return 2\ndef b(completion): return 3", user("my.py:a", weight=0.5),
                 user("my.py:b", weight=-1.0))  # fmt: skip

    found = pool.score([sample()])[0]

    assert (found.reward, found.parts) == (0.5 * 2 - 3, {"a": 2.0, "b": 3.0})


def test_a_sum_beyond_all_bounds_is_no_reward(start: Start) -> None:
    rewards = (user("my.py:a", weight=1e10), user("my.py:b"))
    source = "def a(completion): return 1e30\ndef b(completion): return 3"

    dropped = start(source, *rewards).score([sample()])[0]
    valued = start(source, *rewards, on_nan=-1.0).score([sample()])[0]

    assert (dropped.reward, dropped.fault, dropped.drop) == (None, "nan", "sample")
    assert "reward a and its weight make a sum of 1e+40" in dropped.message
    assert (valued.reward, valued.fault, valued.drop) == (-1.0, "nan", None)


def test_none_beside_a_number_is_left_out_of_the_sum(start: Start) -> None:
    found = start(SEVERAL, user("my.py:number"), user("my.py:nothing")).score([sample()])[0]

    assert (found.reward, found.fault, found.drop) == (2.0, None, None)
    assert found.parts == {"number": 2.0, "nothing": None}


def test_none_of_all_rewards_has_a_policy(start: Start) -> None:
    rewards = (user("my.py:nothing"), user("my.py:nothing", name="again"))

    dropped = start(SEVERAL, *rewards, on_none="drop_group").score([sample()])[0]
    valued = start(SEVERAL, *rewards, on_none=-1.0).score([sample()])[0]

    assert (dropped.reward, dropped.fault, dropped.drop) == (None, "none", "group")
    assert (valued.reward, valued.fault, valued.drop) == (-1.0, "none", None)


@pytest.mark.parametrize(
    ("policies", "reward", "fault", "drop"),
    [
        ({}, None, "nan", "sample"),
        ({"on_error": "drop_group"}, None, "error", "group"),
        ({"on_error": -1.0}, None, "nan", "sample"),
        ({"on_error": -1.0, "on_nan": 0.25}, 2 - 10 + 0.25, "nan", None),
    ],
)
def test_the_fault_that_drops_most_decides(
    start: Start, policies: dict[str, object], reward: float | None, fault: str, drop: str | None
) -> None:
    rewards = (user("my.py:number"), user("my.py:nan"), user("my.py:fails", weight=10.0))

    found = start(SEVERAL, *rewards, **policies).score([sample()])[0]

    assert (found.reward, found.fault, found.drop) == (reward, fault, drop)


def test_a_fault_of_one_sample_leaves_the_others_of_a_batch_alone(start: Start) -> None:
    pool = start("""
        def reward(completions):
            if "bad" in completions: raise ValueError("bad one")
            return [len(each) for each in completions]
        """)  # fmt: skip

    found = pool.score(samples("a", "bb", "bad", "cc"))

    assert [each.reward for each in found] == [1.0, 2.0, None, 2.0]
    assert "raised ValueError: bad one (my.py:3)" in found[2].message


def test_a_batch_with_too_few_results_is_an_error(start: Start) -> None:
    found = start("def reward(completions): return [1.0, 2.0]").score(samples("a", "b", "c"))

    assert [each.fault for each in found] == ["error"] * 3
    assert "returned 2 values for 3 completions" in found[0].message


def test_a_batch_may_return_an_array(start: Start) -> None:
    pool = start("import numpy\ndef reward(completions): return numpy.arange(len(completions)) / 2")

    assert [each.reward for each in pool.score(samples("a", "b", "c"))] == [0.0, 0.5, 1.0]


def test_a_row_that_cannot_travel_is_an_error_of_its_sample(start: Start) -> None:
    pool = start("def reward(completion, value): return 1")

    found = pool.score([sample("a", 0, value=lambda: 1), sample("b", 1, value=2)])

    assert [each.reward for each in found] == [None, 1.0]
    assert "cannot be sent the row" in found[0].message
