"""Episodes advance turn by turn against real environments, with a policy that says what a script says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.tokens.chat_template import ChatTemplate, TemplateRefuses
from holdfast.environments.base import ToolCall
from holdfast.rollout.episodes.calls import FAMILIES, parser_of_family
from holdfast.rollout.episodes.episode import Episode
from holdfast.rollout.episodes.history import TurnTemplate
from holdfast.rollout.episodes.proof import proved_parser
from holdfast.training.policy.episode_groups import group_of, trajectory_of_episode
from holdfast.types import Finish, Prompt
from tests.rollout.conftest import GUESS, ScriptedEngine
from tests.rollout.test_episode_tokens import ADD, CHATML, FORGETFUL, THOUGHTLESS, bpe


def counting(text: str) -> str:
    """Guess one more in every turn."""
    return str(text.count("<|im_start|>assistant"))


def told(episode: Episode) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in episode.messages]


def test_each_episode_ends_where_its_environment_says(play: Callable[..., list[Episode]]) -> None:
    engine = ScriptedEngine(bpe(), counting)

    episodes = play(engine, [{"target": "1"}, {"target": "3"}, {"target": "9"}])

    assert [episode.ended for episode in episodes] == ["done", "done", "turns"]
    assert [round(episode.reward, 6) for episode in episodes] == [1.0, 0.8, -0.4]
    assert [episode.turn_rewards for episode in episodes] == [[1.0], [-0.1, -0.1, 1.0], [-0.1] * 4]
    assert told(episodes[1]) == [
        "user: play", "assistant: 1", "user: no, after 1", "assistant: 2", "user: no, after 2", "assistant: 3",
        "user: right",
    ]  # fmt: skip
    assert [len(requests) for requests in engine.asked] == [1, 1, 1, 1]  # equal prompts are one request
    tokens = episodes[1].tokens
    assert tokens is not None
    assert engine.tokenizer.decode(tokens.tokens.tolist()) == (
        "<|im_start|>user\nplay<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\nno, after 1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nno, after 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    )
    assert engine.tokenizer.decode(tokens.tokens[tokens.sampled].tolist()) == "1<|im_end|>2<|im_end|>3<|im_end|>"


def test_the_seed_of_a_turn_follows_from_the_episode_and_the_turn_alone(play: Callable[..., list[Episode]]) -> None:
    engine, again = ScriptedEngine(bpe(), counting), ScriptedEngine(bpe(), counting)

    play(engine, [{"target": "9"}, {"target": "9"}])
    play(again, [{"target": "9"}, {"target": "9"}], instances=1)

    seeds = [request.seeds for requests in engine.asked for request in requests]
    assert seeds[0] == (5, 6)
    assert len({seed for pair in seeds for seed in pair}) == 8
    alone = [request.seeds for requests in again.asked for request in requests]
    assert alone == [(pair[place],) for place in range(2) for pair in seeds]


def test_what_an_environment_asks_first_belongs_to_the_prompt(play: Callable[..., list[Episode]]) -> None:
    (episode,) = play(ScriptedEngine(bpe(), counting), [{"target": "1", "asks": True}])

    assert told(episode)[:2] == ["user: play", "user: guess"]
    assert episode.prompt_messages == 2
    assert episode.tokens is not None
    assert episode.tokens.turns[0] == -1
    assert episode.tokens.turn_count == 1


def test_calls_are_run_and_those_that_fail_are_told_to_the_policy(play: Callable[..., list[Episode]]) -> None:
    said = [
        '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 12,\n</tool_call>',
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        "it is 46.",
    ]
    engine = ScriptedEngine(bpe(), lambda text: said[text.count("<|im_start|>assistant") - 1])

    (episode,) = play(engine, [{}], path=None, tools="tools.py:add", max_new_tokens=80, max_length=800)

    assert episode.ended == "done"
    assert told(episode)[2] == "tool: 46"
    assert told(episode)[4].startswith("tool: error: the call is no JSON (")
    assert told(episode)[6] == "tool: error: there is no tool sub; there is add"
    assert told(episode)[7] == "assistant: it is 46."
    assert (dict(episode.called), episode.failed_calls) == ({"add": 1, "unknown": 2}, 2)


@pytest.mark.parametrize(("most", "turns"), [(1, 2), (2, 4), (3, 6), (None, 6)])
def test_calls_that_fail_in_a_row_end_their_episode(
    play: Callable[..., list[Episode]], most: int | None, turns: int
) -> None:
    good = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    said = [good, '<tool_call>{"name": "add", "arg', good, *3 * ['<tool_call>{"name": "sub"}</tool_call>']]
    if most == 2:
        said[3] = "".join(said[3:5])  # both calls of one turn
    engine = ScriptedEngine(bpe(), lambda text: said[text.count("<|im_start|>assistant") - 1])

    (episode,) = play(
        engine, [{}], path=None, tools="tools.py:add", max_new_tokens=80, max_length=1600, max_turns=6,
        max_failed_calls=most,
    )  # fmt: skip

    assert (episode.ended, episode.turn_count) == ("failed_calls" if most else "turns", turns)
    assert episode.finish is (Finish.STOP if most else Finish.LENGTH)
    assert episode.messages[-1]["role"] == "tool", "what went wrong last is told"


def test_a_turn_that_is_cut_ends_its_episode_or_goes_on_with_an_end_that_nobody_chose(
    play: Callable[..., list[Episode]],
) -> None:
    tokenizer = bpe()
    rows = [{"target": "no number"}]

    (ended,) = play(ScriptedEngine(tokenizer, lambda _: "hello hello hello", cut=2), rows)
    (continued,) = play(
        ScriptedEngine(tokenizer, lambda _: "hello hello hello", cut=2), rows, ends_when_cut=False, max_turns=2
    )

    assert (ended.ended, ended.finish, ended.cut_turns) == ("cut", Finish.LENGTH, 1)
    assert (continued.ended, continued.cut_turns) == ("turns", 2)
    tokens = continued.tokens
    assert tokens is not None
    ends = tokens.tokens == tokenizer.eos_token_id
    assert not np.any(ends & tokens.sampled)
    assert np.all(tokens.logprobs[ends] == 0)


def test_an_episode_ends_where_no_turn_has_room_or_time(play: Callable[..., list[Episode]]) -> None:
    rows = [{"target": "9"}]

    (room,) = play(ScriptedEngine(bpe(), counting), rows, max_length=90)
    (seconds,) = play(ScriptedEngine(bpe(), counting), rows, max_seconds=1e-9)

    assert room.ended == "room"
    assert room.tokens is not None
    assert room.tokens.tokens.size <= 90
    assert bool(room.tokens.sampled[-1]), "what was observed and never read is left out"
    assert seconds.ended == "seconds"
    assert seconds.finish is Finish.LENGTH


def test_an_environment_that_dies_is_made_once_more_and_then_the_episode_is_left_out(
    play: Callable[..., list[Episode]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = (
        GUESS.replace('row["target"]', 'row["target"]; self._file = row.get("file")')
        .replace(
            'turn.text == "die"', 'turn.text == "die" and not (self._file and __import__("os").path.exists(self._file))'
        )
        .replace("import os\n", "import os\n                if self._file: open(self._file, 'w').close()\n")
    )
    engine = ScriptedEngine(bpe(), lambda text: "die" if text.count("assistant") == 1 else "1")

    lost, saved = play(engine, [{"target": "1"}, {"target": "1", "file": "once"}], source=source)

    assert (lost.ended, lost.finish, lost.attempts) == ("fault", Finish.ERROR, 2)
    assert "ended its process (exit code 3)" in lost.fault
    assert (saved.ended, saved.attempts) == ("done", 2)
    assert told(saved) == ["user: play", "assistant: die", "user: no, after 1", "assistant: 1", "user: right"]


def test_no_turn_waits_for_that_of_another_episode(play: Callable[..., list[Episode]], tmp_path: Path) -> None:
    """The first turn of one is answered once the other has come to its third."""
    source = f"""
        import time
        from pathlib import Path
        from holdfast.environments.base import Observation
        REACHED = Path({str(tmp_path / "reached")!r})
        class World:
            def begin(self, row):
                self.waits = row["waits"]
            def step(self, turn):
                if turn.number == 2:
                    REACHED.touch()
                while self.waits and not REACHED.exists():
                    time.sleep(0.01)
                return Observation("more", 0.0, turn.number == 2)
    """

    rows = [{"waits": True}, {"waits": False}]
    episodes = play(ScriptedEngine(bpe(), counting), rows, source=source, timeout_seconds=5.0)

    assert [(episode.ended, episode.turn_count, episode.attempts) for episode in episodes] == [("done", 3, 1)] * 2


def test_a_step_that_goes_wrong_costs_its_own_episode_alone(play: Callable[..., list[Episode]]) -> None:
    """Four seconds: one that hangs is made twice, and waited for two seconds each time."""
    source = """
        import os, time
        from holdfast.environments.base import Observation
        class World:
            def begin(self, row):
                self.does = row["does"]
            def step(self, turn):
                match self.does:
                    case "hang": time.sleep(600)
                    case "die": os._exit(3)
                    case "fork": os.fork()
                    case "print": print("x" * (1 << 22))
                    case "garbage": return 7
                    case "nan": return Observation("more", float("nan"))
                return Observation("more", 0.25, self.does == "end at once")
    """
    expected = {
        "hang": ("fault", 2, 0.0), "die": ("fault", 2, 0.0), "garbage": ("fault", 2, 0.0), "nan": ("fault", 2, 0.0),
        "fork": ("turns", 1, 1.0), "print": ("turns", 1, 1.0), "end at once": ("done", 1, 0.25),
        "never end": ("turns", 1, 1.0),
    }  # fmt: skip

    rows = [{"does": name} for name in expected]
    episodes = play(ScriptedEngine(bpe(), counting), rows, source=source, timeout_seconds=2.0)

    found = [(episode.ended, episode.attempts, episode.reward) for episode in episodes]
    assert dict(zip(expected, found, strict=True)) == expected
    assert "returned a int (7), and a step returns an Observation" in episodes[2].fault
    assert episodes[3].fault == "returned the reward a float (nan), which is no finite number"


def test_a_completion_is_what_the_policy_said_whatever_role_an_environment_takes(
    play: Callable[..., list[Episode]],
) -> None:
    source = """
        class World:
            replayable = True
            def begin(self, row): ...
            def step(self, turn):
                return {"messages": [{"role": "assistant", "content": "the right answer"}], "done": True}
    """
    engine = ScriptedEngine(bpe(), lambda _: "no idea")

    episodes = play(engine, [{}], source=source)
    prompt = Prompt(0, episodes[0].request.prompt, "", {})
    group = group_of(prompt, [trajectory_of_episode(one, SamplingConfig()) for one in episodes], engine.tokenizer)

    assert told(episodes[0])[-1] == "assistant: the right answer"
    assert group.trajectories[0].completion == "no idea"


def test_an_episode_that_is_abandoned_before_its_final_reward_is_aborted(play: Callable[..., list[Episode]]) -> None:
    source = """
        import time
        class World:
            def reset(self, **row): ...
            def look(self) -> str:
                return "nothing"
            def get_reward(self):
                time.sleep(600)
    """
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    asked: list[bool] = []
    engine = ScriptedEngine(bpe(), lambda _: call)

    def interrupted() -> bool:
        asked.append(bool(engine.asked))
        return asked.count(True) > 3

    (episode,) = play(engine, [{}], source=source, max_turns=1, interrupted=interrupted)

    assert (episode.ended, episode.finish) == ("aborted", Finish.ABORT)


def test_a_template_that_forgets_thoughts_gives_a_sample_for_each_turn_after_one(
    play: Callable[..., list[Episode]],
) -> None:
    """Each prompt is what the template writes of the turns before it; the second turn has no thought to forget."""
    tokenizer = copy.deepcopy(bpe())
    tokenizer.chat_template = FORGETFUL
    said = ["<think>low</think>1", "2", "<think>high</think>3"]
    engine = ScriptedEngine(tokenizer, lambda text: said[text.count("<|im_start|>assistant") - 1])

    (episode,) = play(engine, [{"target": said[2]}], splits_at=["user"])

    asked = "<|im_start|>user\nplay<|im_end|>\n<|im_start|>assistant\n"
    again = asked + "1<|im_end|>\n<|im_start|>user\nno, after 1<|im_end|>\n<|im_start|>assistant\n"
    third = again + "2<|im_end|>\n<|im_start|>user\nno, after 2<|im_end|>\n<|im_start|>assistant\n"
    texts = [tokenizer.decode(sample.tokens.tolist()) for sample in episode.samples]
    assert texts == [asked + said[0] + "<|im_end|>", third + said[2] + "<|im_end|>"]
    chosen = [tokenizer.decode(sample.tokens[sample.sampled].tolist()) for sample in episode.samples]
    assert chosen == ["<think>low</think>1<|im_end|>", "2<|im_end|><think>high</think>3<|im_end|>"]
    assert [sample.turn_count for sample in episode.samples] == [1, 2]
    assert (episode.ended, episode.turn_count, episode.turn_rewards) == ("done", 3, [-0.1, -0.1, 1.0])
    assert len({seed for requests in engine.asked for request in requests for seed in request.seeds}) == 3


def test_thoughts_stay_behind_results_of_tools_and_go_at_the_user_s_next_message(
    play: Callable[..., list[Episode]],
) -> None:
    source = """
        from holdfast.environments.base import Observation
        class World:
            def begin(self, row): ...
            def look(self) -> str:
                return "nothing"
            def step(self, turn):
                return Observation("go on", done=turn.number == 2)
    """
    tokenizer = copy.deepcopy(bpe())
    tokenizer.chat_template = THOUGHTLESS
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    said = [f"<think>a</think>{call}", "<think>b</think>2", "<think>c</think>3"]
    engine = ScriptedEngine(tokenizer, lambda text: said[text.count("<|im_start|>assistant") - 1])

    (episode,) = play(engine, [{}], source=source, splits_at=["user"], max_length=900, max_new_tokens=80)

    texts = [tokenizer.decode(sample.tokens.tolist()) for sample in episode.samples]
    assert [text.count("<think>") for text in texts] == [2, 1]
    assert f"{call}<|im_end|>\n<|im_start|>tool\nnothing<|im_end|>\n<|im_start|>assistant\n2" in texts[1]
    chosen = [tokenizer.decode(sample.tokens[sample.sampled].tolist()) for sample in episode.samples]
    assert chosen == [f"{said[0]}<|im_end|>{said[1]}<|im_end|>", f"{said[2]}<|im_end|>"]


def test_an_observation_with_more_characters_than_an_episode_can_have_is_not_rendered(
    play: Callable[..., list[Episode]],
) -> None:
    source = """
        from holdfast.environments.base import Observation
        class World:
            def begin(self, row):
                self.said = row.get("says", "a" * 5000)
                return "a" * row["begins"]
            def step(self, turn):
                return Observation(self.said, reward=0.5)
    """
    rendered: list[int] = []
    engine = ScriptedEngine(copy.deepcopy(bpe()), lambda _: "hello")

    class Counted(type(engine.tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
            rendered.append(max(len(str(message.get("content"))) for message in conversation) + len(conversation))
            return super().apply_chat_template(conversation, *args, **kwargs)

    engine.tokenizer.__class__ = Counted
    rows = [{"begins": 5}, {"begins": 5, "says": [{"role": "user", "content": ""}] * 450}, {"begins": 5000}]
    turns, empty, begins = play(engine, rows, source=source, max_characters=4000)

    assert (turns.ended, turns.turn_rewards) == (empty.ended, empty.turn_rewards) == ("room", [0.5])
    assert (begins.ended, begins.attempts) == ("fault", 2)
    assert max(rendered) < 100


@pytest.mark.parametrize("done", [True, False])
def test_an_observation_is_kept_up_to_the_characters_that_an_episode_can_have(
    play: Callable[..., list[Episode]], done: bool
) -> None:
    source = f"""
        from holdfast.environments.base import Observation
        class World:
            def begin(self, row): ...
            def step(self, turn):
                first = {{"role": "user", "content": "a" * 3000, "name": "b" * 9000}}
                others = [{{"role": "c" * 9000, "content": "d" * 9000}}] * 3
                return Observation([first, *others], 1.0, {done})
    """

    (episode,) = play(ScriptedEngine(bpe(), lambda _: "hello"), [{}], source=source, max_characters=4000)

    said = episode.messages[episode.prompt_messages :]
    assert (episode.ended, episode.reward) == ("done" if done else "room", 1.0)
    assert [len(message["content"].partition(" (")[0]) for message in said[1:]] == [3000, 1000]
    assert sum(len(str(message)) for message in said) < 6000


def test_more_messages_than_an_episode_has_tokens_leave_no_room(play: Callable[..., list[Episode]]) -> None:
    source = """
        from holdfast.environments.base import Observation
        class World:
            def begin(self, row): ...
            def step(self, turn):
                return Observation([{"role": "user", "content": ""}] * 5000, 1.0, False)
    """

    (episode,) = play(ScriptedEngine(bpe(), lambda _: "hello"), [{}], source=source)

    assert (episode.ended, episode.fault) == ("room", "")


def test_the_form_of_trl_runs_unchanged(play: Callable[..., list[Episode]]) -> None:
    source = '''
        class World:
            def reset(self, target, **row):
                self.target, self.guesses = target, 0
                return " a number"
            def guess(self, number: int) -> str:
                """Guess.

                Args:
                    number: The number.
                """
                self.guesses += 1
                return "right" if number == int(self.target) else "wrong"
            def get_reward(self) -> float:
                return 1.0 / self.guesses
    '''
    call = '<tool_call>{"name": "guess", "arguments": {"number": N}}</tool_call>'
    said = [call.replace("N", number) for number in ("1", "2")]
    engine = ScriptedEngine(bpe(), lambda text: [*said, "done"][text.count("<|im_start|>assistant") - 1])

    (episode,) = play(engine, [{"target": "2"}], source=source, max_new_tokens=80, max_length=800)

    assert told(episode)[0] == "user: play a number"
    assert told(episode)[2::2] == ["tool: wrong", "tool: right"]
    assert (episode.ended, episode.reward) == ("done", 0.5)
    assert episode.turn_rewards == [0.0, 0.0, 0.5]


def test_calls_are_read_by_the_response_template_of_a_tokenizer(play: Callable[..., list[Episode]]) -> None:
    """In a syntax that no family has: the end token ends a call, and what a call has is typed by its tool."""
    tokenizer = copy.deepcopy(bpe())
    hermes = CHATML[CHATML.index("<tool_call>") : CHATML.index("</tool_call>") + len("</tool_call>")]
    written = "{{ call.function.name }}({% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};"
    tokenizer.chat_template = CHATML.replace(hermes, f"call {written}{{% endfor %}})")
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"call (?P<name>\w+)\(",
                "close_pattern": r"\)(?=<\|im_end\|>)",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"(?P<key>\w+)=(?P<value>[^;]*);", "value_parser": {"name": "text"}},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
        },
    }
    said = ["call add(a=12;b=34;)", "call add(a=12;b=thirty;)", "call sub()", "it is 46."]
    engine = ScriptedEngine(tokenizer, lambda text: said[text.count("<|im_start|>assistant") - 1])

    (episode,) = play(engine, [{}], path=None, tools="tools.py:add", max_new_tokens=80, max_length=800)

    assert told(episode)[2] == "tool: 46"
    assert told(episode)[4] == "tool: error: b of add should be integer, not 'thirty'"
    assert told(episode)[6] == "tool: error: there is no tool sub; there is add"
    assert (episode.ended, dict(episode.called), episode.failed_calls) == ("done", {"add": 2, "unknown": 1}, 2)


CALL = ToolCall("add", {"a": 1})
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "phi4": '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "000000000"}]',
    "json": '{"name": "add", "parameters": {"a": 1}}',
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_syntax_are_read(family: str) -> None:
    parse = parser_of_family(FAMILIES[family])

    assert parse(WRITTEN[family]) == (CALL,)
    assert parse("the sum is 3") == ()
    (broken,) = parse(WRITTEN[family].replace("1}", "1"))
    assert broken.mistake.startswith("the call is no JSON")


def test_a_syntax_that_nothing_reads_is_refused() -> None:
    tokenizer = bpe()
    strange = ChatTemplate(tokenizer, CHATML.replace("<tool_call>\\n{", "call {").replace("<tool_call>", ""), {}, "it")
    writer = TurnTemplate(strange, [ADD], [tokenizer.eos_token_id])

    with pytest.raises(TemplateRefuses, match="none of the syntaxes hermes, phi4, mistral, json reads back as add_num"):
        proved_parser(strange, writer, [ADD])
