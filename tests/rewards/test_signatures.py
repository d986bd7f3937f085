"""What a user's function is given: by the names of its parameters, in our form and in those of other systems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config.sections.reward import RewardPoolConfig, UserRewardConfig
from holdfast.errors import ConfigError
from holdfast.rewards.base import RunProgress, Sample
from holdfast.rewards.pool import RewardPool
from tests.rewards.conftest import Start, sample, samples, user

EXAMPLES = Path(__file__).parents[2] / "examples" / "rewards"
WHOLE = Sample(7, "2+2=", "4 now", [5, 6], [8, 9, 10], "length", {"answer": "4", "level": 3})


def told(pool: RewardPool, each: Sample = WHOLE) -> str:
    """Return what the reward complained of; these functions raise what they were given."""
    return pool.score([each])[0].message


def test_one_sample_is_seen_by_name(start: Start) -> None:
    pool = start("""
        def reward(prompt, completion, prompt_tokens, prompt_ids, completion_tokens, completion_ids, finish, sample_id,
                   answer, level, bonus=0, unknown="default"):
            assert prompt_tokens == prompt_ids and completion_tokens == completion_ids
            raise ValueError([prompt, completion, prompt_ids, completion_ids, finish, sample_id, answer, level, bonus,
                              unknown])
        """, user(kwargs={"bonus": 2}))  # fmt: skip

    assert "['2+2=', '4 now', [5, 6], [8, 9, 10], 'length', 7, '4', 3, 2, 'default']" in told(pool)


def test_a_function_of_one_sample_is_given_the_messages_of_an_episode(start: Start) -> None:
    said = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4 now"}]
    pool = start("""
        def reward(completion, messages):
            raise ValueError(messages)
        """)

    assert str(said) in told(pool, replace(WHOLE, messages=said, prompt_messages=1))


def test_a_double_star_gets_every_column_and_value(start: Start) -> None:
    pool = start("""
        def reward(completion, **rest):
            raise ValueError(sorted(rest))
        """)

    assert "['answer', 'completion_ids', 'completion_tokens', 'finish', 'level'" in told(pool)


def test_own_arguments_go_before_columns(start: Start) -> None:
    pool = start("def reward(level): return level", user(kwargs={"level": 9}))

    assert pool.score([WHOLE])[0].reward == 9.0


def test_a_batched_function_gets_lists(start: Start) -> None:
    pool = start("""
        def reward(completions, completion_ids, finish, sample_id, level, scale):
            assert finish == ["stop"] * 3 and level == [1, 1, 1]
            each = zip(completions, completion_ids, sample_id)
            return [scale * len(text) + 100 * place + len(ids) for text, ids, place in each]
        """, user(kwargs={"scale": 10}))  # fmt: skip

    found = pool.score(samples("a", "bb", "ccc", level=1))

    assert [each.reward for each in found] == [11.0, 122.0, 233.0]


def test_a_batched_function_sees_at_most_a_batch_in_order(start: Start) -> None:
    pool = start(
        "def reward(completions, sample_id): return [len(sample_id) * 100 + i for i in sample_id]", batch_size=3
    )

    found = pool.score(samples(*"abcdefgh"))

    assert [each.reward for each in found] == [300, 301, 302, 303, 304, 305, 206, 207]


def test_coroutines_run_side_by_side(start: Start) -> None:
    """One after the other, they would wait for each other until they are killed."""
    pool = start("""
        import asyncio
        together = asyncio.Barrier(4)
        async def reward(completion):
            await together.wait()
            return len(completion)
        """, workers=1, batch_size=4, timeout_seconds=3)  # fmt: skip

    assert [each.reward for each in pool.score(samples("a", "bb", "ccc", "dddd"))] == [1, 2, 3, 4]


def test_a_worker_has_one_event_loop(start: Start) -> None:
    """Clients keep the loop they were first used in."""
    pool = start("""
        import asyncio
        loops = set()
        async def reward(completion):
            loops.add(asyncio.get_running_loop())
            return len(loops)
        """, workers=1, batch_size=2)  # fmt: skip

    assert [each.reward for each in pool.score(samples(*"abcd"))] == [1.0] * 4


def test_an_async_batched_function_is_awaited(start: Start) -> None:
    pool = start("async def reward(completions, **kwargs): return [len(each) for each in completions]")

    assert [each.reward for each in pool.score(samples("a", "bb"))] == [1, 2]


def test_a_class_is_made_once_and_called(start: Start) -> None:
    pool = start("""
        class Reward:
            def __init__(self, bonus): self.bonus = bonus
            def __call__(self, completion): return len(completion) + self.bonus
        instance = Reward(100)
        """, user("my.py:Reward", kwargs={"bonus": 10}), user("my.py:instance"))  # fmt: skip

    assert pool.score([sample("abc")])[0].parts == {"Reward": 13.0, "instance": 103.0}


def test_a_file_imports_its_neighbours_and_shares_its_module_between_rewards(start: Start, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_my.py").write_text("VALUE = 3\n")
    pool = start("""
        from neighbour_of_my import VALUE
        seen = []
        def reward(completion): seen.append(1); return VALUE
        def second(completion): return len(seen)
        """, user(), user("my.py:second"), workers=1)  # fmt: skip

    assert pool.score([sample()])[0].parts == {"reward": 3.0, "second": 1.0}


def test_a_conversation_stays_a_conversation_for_trl(start: Start) -> None:
    pool = start("""
        def reward(prompts, completions, completion_ids=None, answer=None, **kwargs):
            kwargs["log_metric"]("asked", len(prompts))
            return [0.0 if isinstance(text, str) else len(prompt) + len(text[0]["content"]) + len(text[0]["role"])
                    for prompt, text in zip(prompts, completions)]
        """)  # fmt: skip
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

    talk, text = pool.score([sample("abc", 0, prompt=turns), sample("abc", 1, prompt="text")])

    assert (talk.reward, text.reward) == (2 + 3 + 9, 0.0)
    assert talk.metrics == {"reward/asked": 2.0}


def test_easyr1_sequential_form(start: Start) -> None:
    pool = start("""
        def compute_score(reward_input, format_weight=0.1):
            assert isinstance(reward_input, dict)
            right = reward_input["response"].startswith(reward_input["ground_truth"])
            return {"overall": (1 - format_weight) * right, "length": reward_input["response_length"]}
        """, user("my.py:compute_score", kwargs={"format_weight": 0.25}))  # fmt: skip

    assert pool.score([WHOLE])[0].parts == {"compute_score": 0.75, "compute_score/length": 3.0}


def test_verl_batched_form_and_its_place_of_the_answer(start: Start) -> None:
    pool = start("""
        def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
            return [{"score": text == gold, "acc": source == "s" and info == {"index": 1}}
                    for source, text, gold, info in zip(data_sources, solution_strs, ground_truths, extra_infos)]
        """, user("my.py:compute_score"))  # fmt: skip
    row = {"reward_model": {"style": "rule", "ground_truth": "4"}, "data_source": "s", "extra_info": {"index": 1}}

    assert pool.score([sample("4", 0, **row)])[0].parts == {"compute_score": 1.0, "compute_score/acc": 1.0}


@pytest.mark.parametrize(
    ("reward", "completion", "row", "parts"),
    [
        (
            {"path": "one_completion.py:short_and_right", "kwargs": {"longest": 3}},
            "it is 4",
            {"answer": "4"},
            {"short_and_right": 0.5, "short_and_right/right": 1.0, "short_and_right/short": 0.0},
        ),
        ({"path": "concurrent.py:Reviewer", "kwargs": {"seconds": 0}}, "please", {}, {"Reviewer": 1.0}),
        ({"path": "from_trl.py:ends_with_answer"}, "it is 4", {"answer": "4"}, {"ends_with_answer": 1.0}),
        (
            {"path": "from_easyr1.py:compute_score", "kwargs": {"format_weight": 0.25}},
            r"\boxed{5}",
            {"answer": "4"},
            {"compute_score": 0.25, "compute_score/format": 1.0, "compute_score/accuracy": 0.0},
        ),
        (
            {"path": "from_verl.py:compute_score"},
            "#### 4",
            {"answer": "4", "data_source": "openai/gsm8k"},
            {"compute_score": 1.0, "compute_score/acc": 1.0, "compute_score/is_train": 1.0,
             "compute_score/from_gsm8k": 1.0},
        ),
    ],
)  # fmt: skip
def test_the_examples_run(
    tmp_path: Path, reward: dict[str, object], completion: str, row: dict[str, object], parts: dict[str, float]
) -> None:
    section = UserRewardConfig.model_validate(reward)
    with RewardPool([section], RewardPoolConfig(workers=1), EXAMPLES, tmp_path) as pool:
        found = pool.score([sample(completion, 0, **row)])[0]

    assert dict(found.parts) == pytest.approx(parts, abs=1e-12)


def test_a_parameter_that_nothing_fills_is_named(start: Start) -> None:
    pool = start("def reward(completion, ground_truth): return 1")

    said = told(pool)

    assert "its parameter ground_truth is no column of the row and none of its kwargs" in said
    assert "(columns: answer, level)" in said


@pytest.mark.parametrize(
    ("source", "kwargs", "said"),
    [
        ("def reward(completion, /): return 1", {}, "completion is positional-only"),
        ("def reward(): return 1", {}, "takes no named parameter, so it sees nothing"),
        ("def reward(completion, weight=1): return 1", {"wieght": 2}, "kwargs has wieght, and the function takes "
                                                                      "completion, weight"),
        ("class reward:\n    def __init__(self, size): pass", {}, "the constructor of reward"),
        ("class reward: pass", {}, "has no __call__"),
        ("def reward(solution_str, ground_truth, level): return 1", {}, "by its parameter solution_str it is given "
         "data_source, solution_str, ground_truth, extra_info and nothing else, and it also demands level"),
        ("other = 3\ndef right(completion): return 1", {}, "has no function reward. It has right."),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_called_is_refused_at_the_start(
    start: Start, source: str, kwargs: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        start(source, user(kwargs=kwargs))


@pytest.mark.parametrize(
    ("parameters", "columns"),
    [
        ("prompt, completion, finish, answer, level=0, bonus=1, **rest", ("answer",)),
        ("completions, prompts, answer, trainer_state, log_metric, **kwargs", ("answer",)),
        ("solution_str, ground_truth, extra_info, data_source", ()),
        ("reward_inputs, weight=1", ()),
        ("completion, bonus", ()),
    ],
)
def test_a_pool_knows_the_columns_without_which_a_function_cannot_be_called(
    start: Start, parameters: str, columns: tuple[str, ...]
) -> None:
    pool = start(f"def reward({parameters}): return 1", user(kwargs={"bonus": 2} if "bonus" in parameters else {}))

    assert pool.columns == {"reward": columns}


def test_a_function_of_trl_s_form_sees_where_the_run_stands(start: Start) -> None:
    pool = start("""
        def reward(completions, trainer_state, **kwargs):
            return [trainer_state.global_step + trainer_state.max_steps / 1000 + trainer_state.epoch] * len(completions)
        """)

    assert pool.score([replace(WHOLE, progress=RunProgress(7, 90, 0.5))])[0].reward == 7 + 0.09 + 0.5
