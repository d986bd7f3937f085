"""Agents of the user's own, in real processes, ask a scripted policy over real HTTP."""

from __future__ import annotations

import copy
import json
import os
import socket
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.sections.environment import AgentConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.content.formats import Conversation
from holdfast.data.tokens.chat_template import ChatTemplate
from holdfast.environments.pool import EnvironmentPool
from holdfast.errors import ConfigError
from holdfast.rollout.engine import converse
from holdfast.rollout.episodes.agents import AgentLoop
from holdfast.rollout.episodes.chat_calls import CallRefused, chat_call
from holdfast.rollout.episodes.endpoint import Endpoint
from holdfast.rollout.episodes.episode import Episode, EpisodeRequest, Limits
from holdfast.rollout.episodes.history import TurnTemplate
from holdfast.rollout.episodes.proof import proved_parser
from holdfast.rollout.episodes.sessions import Syntax
from holdfast.types import Finish
from tests.rollout.conftest import ScriptedEngine
from tests.rollout.test_episode_tokens import ADD, CHATML, FORGETFUL, bpe

CLIENT = """
import json, os, time, urllib.error, urllib.request
def ask(base_url, api_key, messages, **more):
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)
def user(text):
    return {"role": "user", "content": text}
def said(answer):
    return answer["choices"][0]["message"]
"""
GUESS = """
def agent(row, base_url, api_key):
    messages = [user("play")]
    for turn in range(row["turns"]):
        messages.append(said(ask(base_url, api_key, messages)))
        messages.append(user(f"no, after {turn + 1}"))
    return row["turns"] / 4
"""
Run = Callable[..., list[Episode]]


def counting(text: str) -> str:
    """Say how many answers there are with this one."""
    return str(text.count("<|im_start|>assistant"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return a function that runs the agent of a source on rows."""
    pools: list[EnvironmentPool] = []

    def episodes(
        engine: ScriptedEngine,
        source: str,
        rows: Sequence[Mapping[str, Any]] = ({},),
        *,
        splits_at: Sequence[str] = (),
        interrupted: Callable[[], bool] = lambda: False,
        max_length: int = 400,
        max_characters: int = sys.maxsize,
        decode: Callable[[str], str] = lambda text: text,
        **options: Any,
    ) -> list[Episode]:
        (tmp_path / "agent.py").write_text(CLIENT + textwrap.dedent(source))
        options = options if "command" in options else {"run": "agent.py:agent", **options}
        config = AgentConfig.model_validate({"kind": "endpoint", **options})
        pools.append(EnvironmentPool(config, tmp_path, tmp_path / "logs"))
        pools[-1].start()
        template = ChatTemplate(engine.tokenizer, engine.tokenizer.chat_template or CHATML, {}, "it")

        def syntax_of(tools: tuple[Mapping[str, Any], ...]) -> Syntax:
            writer = TurnTemplate(template, tools, [engine.tokenizer.eos_token_id], splits_at)
            return Syntax(writer, proved_parser(template, writer, tools))

        writer = syntax_of(()).writer
        prompt = np.array(writer.opening([{"role": "user", "content": "row"}]), np.int64)
        requests = [
            EpisodeRequest(0, place, 5 + place, (), prompt, row, writer, None) for place, row in enumerate(rows)
        ]
        limits = Limits(
            config.max_turns, max_length, 40, None, False, config.instances, max_characters, config.max_failed_calls
        )

        def decoded(tokens: list[int], plain: bool) -> str:
            return decode(engine.tokenizer.decode(tokens, skip_special_tokens=plain))

        with Endpoint(SamplingConfig()) as endpoint:
            loop = AgentLoop(requests, pools[-1], endpoint, syntax_of, decoded, limits, interrupted)
            converse(engine, loop, SamplingConfig(), interrupted)
            return loop.episodes

    yield episodes
    for pool in pools:
        pool.close()


def text_of(engine: ScriptedEngine, tokens: Any) -> str:
    return str(engine.tokenizer.decode(tokens.tolist()))


def test_calls_that_go_on_from_their_answers_are_one_sample_token_for_token(run: Run) -> None:
    engine = ScriptedEngine(bpe(), counting)

    one, three = run(engine, GUESS, [{"turns": 1}, {"turns": 3}])

    assert [(one.ended, one.reward, one.turn_rewards), (three.ended, three.reward, three.turn_rewards)] == [
        ("done", 0.25, [0.25]),
        ("done", 0.75, [0.0, 0.0, 0.75]),
    ]
    (tokens,) = three.samples
    assert text_of(engine, tokens.tokens) == (
        "<|im_start|>user\nplay<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\nno, after 1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nno, after 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    )
    assert text_of(engine, tokens.tokens[tokens.sampled]) == "1<|im_end|>2<|im_end|>3<|im_end|>"
    assert [message["content"] for message in three.messages] == ["play", "1", "no, after 1", "2", "no, after 2", "3"]
    assert (three.prompt_messages, three.turn_count, three.last_text) == (1, 3, "3")


class SpellingEngine(ScriptedEngine):
    """Says every letter as a token of its own, which encoding the text again would not."""

    def _said(self, request: Any, place: int) -> Any:
        text = self.script(self.tokenizer.decode(request.prompt.tolist()))
        letters = [self.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in text]
        tokens = np.array([*letters, self.tokenizer.eos_token_id], np.int64)
        logprobs = -np.arange(1, tokens.size + 1, dtype=np.float32)
        return super()._said(request, place)._replace(tokens=tokens, logprobs=logprobs)


def test_sampled_tokens_are_never_encoded_again_and_the_agent_is_told_them(run: Run, tmp_path: Path) -> None:
    engine = SpellingEngine(bpe(), lambda _: "hello hello")
    source = """
    def agent(row, base_url, api_key):
        first = ask(base_url, api_key, [user("play")], logprobs=True)
        second = ask(base_url, api_key, [user("play"), said(first), user("again")], logprobs=True)
        json.dump([first, second], open("answers.json", "w"))
    """

    (episode,) = run(engine, source.replace("answers.json", str(tmp_path / "answers.json")))

    (tokens,) = episode.samples
    spelled = [*engine.tokenizer.convert_tokens_to_ids(list("hello")), engine.tokenizer.eos_token_id]
    assert tokens.sampled.sum() == 2 * 12
    assert tokens.tokens[tokens.sampled].tolist()[:5] == spelled[:5]
    assert tokens.logprobs[tokens.sampled].tolist() == 2 * [-float(n) for n in range(1, 13)]
    first, second = json.loads((tmp_path / "answers.json").read_text())
    assert second["prompt_token_ids"] + second["choices"][0]["token_ids"] == tokens.tokens.tolist()
    assert first["choices"][0]["token_ids"] == tokens.tokens[tokens.sampled].tolist()[:12]
    told = second["choices"][0]["logprobs"]["content"]
    assert [item["logprob"] for item in told] == [-float(n) for n in range(1, 13)]
    assert "".join(item["token"] for item in told) == "hello hello<|im_end|>"
    assert second["usage"] == {"prompt_tokens": len(second["prompt_token_ids"]), "completion_tokens": 12,
                               "total_tokens": tokens.tokens.size}  # fmt: skip


def test_a_call_that_goes_on_from_nothing_and_a_second_one_from_an_answer_are_samples_of_their_own(run: Run) -> None:
    engine = ScriptedEngine(bpe(), counting)
    source = """
    def agent(row, base_url, api_key):
        first = said(ask(base_url, api_key, [user("play")]))
        ask(base_url, api_key, [user("play"), first, user("left")])
        ask(base_url, api_key, [user("play"), first, user("right")])
        ask(base_url, api_key, [user("play"), {**first, "content": "edited"}, user("left")])
        ask(base_url, api_key, [user("sum up")])
    """

    (episode,) = run(engine, source)

    chosen = [text_of(engine, sample.tokens[sample.sampled]) for sample in episode.samples]
    assert chosen == ["1<|im_end|>2<|im_end|>", "2<|im_end|>", "2<|im_end|>", "1<|im_end|>"]
    whole = [text_of(engine, sample.tokens) for sample in episode.samples]
    assert "assistant\n1<|im_end|>\n<|im_start|>user\nright" in whole[1]
    assert "assistant\nedited<|im_end|>\n<|im_start|>user\nleft" in whole[2]
    assert whole[3].startswith("<|im_start|>user\nsum up")
    assert episode.turn_count == 5


def test_a_template_that_rewrites_earlier_turns_makes_a_sample_of_each(run: Run) -> None:
    tokenizer = bpe()
    tokenizer.chat_template = FORGETFUL
    engine = ScriptedEngine(tokenizer, lambda _: "<think>\nhello\n</think>\n\nhello")

    (episode,) = run(engine, GUESS, [{"turns": 2}], splits_at=["user"])

    assert len(episode.samples) == 2
    first, second = (text_of(engine, sample.tokens) for sample in episode.samples)
    assert first.count("<think>") == second.count("<think>") == 1
    assert all(sample.turn_count == 1 for sample in episode.samples)


def test_calls_of_tools_are_read_and_their_results_go_on(run: Run, tmp_path: Path) -> None:
    script = ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "<tool_call>{", "it is 3."]
    engine = ScriptedEngine(bpe(), lambda text: script[text.count("<|im_start|>assistant") - 1])
    source = f"""
    def agent(row, base_url, api_key):
        tools, messages, kept = [{ADD!r}], [user("1 + 2?")], []
        for content in ("3", None, None):
            answer = ask(base_url, api_key, messages, tools=tools)["choices"][0]
            kept.append(answer["finish_reason"])
            messages.append(answer["message"])
            for call in answer["message"].get("tool_calls") or ():
                messages.append({{"role": "tool", "tool_call_id": call["id"], "content": "3"}})
            if not answer["message"].get("tool_calls"):
                messages.append(user("and?"))
        json.dump([kept, messages], open({str(tmp_path / "kept.json")!r}, "w"))
    """

    (episode,) = run(engine, source, max_length=800)

    kept, messages = json.loads((tmp_path / "kept.json").read_text())
    assert kept == ["tool_calls", "stop", "stop"]
    called = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert messages[1]["tool_calls"] == [{"id": "000000000", "type": "function", "function": called}]
    assert messages[1]["content"] is None
    assert messages[3]["content"] == "<tool_call>{"
    (tokens,) = episode.samples
    assert text_of(engine, tokens.tokens[tokens.sampled]) == "<|im_end|>".join([*script, ""])
    assert (dict(episode.called), episode.failed_calls) == ({"add": 1, "unknown": 1}, 1)
    assert episode.request.writer.tools[0]["function"]["name"] == "add_numbers"


REFUSED: dict[str, dict[str, Any]] = {
    "stream=True is nothing that this endpoint does, but for False: the answer comes whole; leave it out": {
        "stream": True
    },
    "temperature=0.2: completions are drawn as the run is configured, by rollout.temperature=1.0; leave it out": {
        "temperature": 0.2
    },
    "n=2 is nothing that this endpoint does, but for 1; leave it out": {"n": 2},
    "guided_json='{}' is nothing that this endpoint does; leave it out": {"guided_json": "{}"},
    "messages is missing, or no list with something in it": {"messages": []},
    "messages[0] has no role of system, developer, user, assistant, tool": {"messages": [{"content": "a"}]},
    "messages[0] has content that is no text, and this policy reads text alone": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    },
    "tools is no list of {'type': 'function', 'function': {'name': ..., 'parameters': ...}}": {
        "tools": [{"name": "a"}]
    },
    "max_tokens is no positive integer": {"max_tokens": 0},
}


def test_what_is_not_answered_is_refused_by_name_and_the_agent_may_go_on(run: Run, tmp_path: Path) -> None:
    source = f"""
    def agent(row, base_url, api_key):
        answers = [ask(base_url, api_key, **{{"messages": [user("play")], **more}}) for more in row["bodies"]]
        json.dump(answers, open({str(tmp_path / "answers.json")!r}, "w"))
        ask(base_url, api_key, [user("play")], temperature=1.0, n=1, stream=False, seed=3, user="me")
    """

    (episode,) = run(ScriptedEngine(bpe(), counting), source, [{"bodies": list(REFUSED.values())}])

    answers = json.loads((tmp_path / "answers.json").read_text())
    assert [answer["error"]["message"] for answer in answers] == list(REFUSED)
    assert (episode.ended, episode.turn_count) == ("done", 1)


def test_an_agent_without_its_session_is_told_so_in_a_paragraph(run: Run, tmp_path: Path) -> None:
    source = f"""
    def agent(row, base_url, api_key):
        answers = [ask(base_url, key, [user("play")]) for key in (None, "another")]
        json.dump([base_url, api_key, *answers], open({str(tmp_path / "answers.json")!r}, "w"))
        {{}}[1]
    """

    (episode,) = run(ScriptedEngine(bpe(), counting), source)

    _, _, without, wrong = json.loads((tmp_path / "answers.json").read_text())
    assert without["error"]["type"] == "authentication_error"
    assert without["error"]["message"].startswith(
        "this endpoint answers the agents of a run alone, and the request has"
    )
    assert wrong["error"]["message"].startswith("there is no such session: its agent has returned or was ended, or the")
    assert (episode.ended, episode.attempts, episode.finish) == ("fault", 2, Finish.ERROR)
    assert episode.fault.startswith("raised KeyError: 1")


def test_budgets_end_an_episode_and_the_agent_is_told_which(run: Run, tmp_path: Path) -> None:
    source = f"""
    def agent(row, base_url, api_key):
        messages, codes = [user("play")], []
        for turn in range(5):
            answer = ask(base_url, api_key, messages)
            if "error" in answer:
                codes.append(answer["error"]["code"])
                break
            messages += [said(answer), user("again " * row["words"])]
        json.dump(codes, open({str(tmp_path)!r} + f"/{{row['name']}}.json", "w"))
        if row["raises"]:
            raise OSError("refused")
        return 1.0
    """
    rows = [
        {"name": "turns", "words": 1, "raises": False},
        {"name": "room", "words": 60, "raises": False},
        {"name": "raises", "words": 60, "raises": True},
    ]

    episodes = run(ScriptedEngine(bpe(), counting), source, rows, max_turns=3)

    assert [episode.ended for episode in episodes] == ["turns", "room", "room"]
    assert [episode.reward for episode in episodes] == [1.0, 1.0, 0.0]
    assert [episode.finish for episode in episodes] == [Finish.LENGTH] * 3
    assert json.loads((tmp_path / "turns.json").read_text()) == ["rate_limit_exceeded"]
    assert json.loads((tmp_path / "room.json").read_text()) == ["context_length_exceeded"]


def test_calls_that_cannot_be_read_end_an_episode_and_the_agent_is_told(run: Run, tmp_path: Path) -> None:
    source = f"""
    TOOL = {{"type": "function", "function": {{"name": "add", "parameters": {{"type": "object", "properties": {{}}}}}}}}
    def agent(row, base_url, api_key):
        messages = [user("play")]
        while True:
            answer = ask(base_url, api_key, messages, tools=[TOOL])
            if "error" in answer:
                json.dump(answer["error"], open({str(tmp_path)!r} + "/refused.json", "w"))
                return 0.25
            messages += [said(answer), user("once more")]
    """
    words = ["<tool_call>{", "well", "<tool_call>{", "<tool_call>{"]
    engine = ScriptedEngine(bpe(), lambda text: words[text.count("<|im_start|>assistant") - 1])

    (episode,) = run(engine, source, max_failed_calls=2)

    assert (episode.ended, episode.finish, episode.turn_count) == ("failed_calls", Finish.STOP, 4)
    assert (episode.failed_calls, episode.reward) == (3, 0.25)
    refused = json.loads((tmp_path / "refused.json").read_text())
    assert refused["code"] == "rate_limit_exceeded"
    assert "environment.max_failed_calls=2" in refused["message"]


def test_an_agent_that_hangs_dies_or_returns_garbage_ends_its_own_episode_alone(run: Run) -> None:
    source = """
    def agent(row, base_url, api_key):
        if row["first"]:
            ask(base_url, api_key, [user("play")])
        if row["does"] == "hang":
            time.sleep(600)
        if row["does"] == "die":
            os._exit(3)
        return {"does": "nothing"} if row["does"] == "garbage" else None
    """
    does = [("hang", True), ("hang", False), ("die", True), ("garbage", True), ("return", False), ("return", True)]

    episodes = run(
        ScriptedEngine(bpe(), counting),
        source,
        [{"does": do, "first": first} for do, first in does],
        timeout_seconds=1.0,
    )

    assert [episode.ended for episode in episodes] == ["seconds", "fault", "fault", "fault", "fault", "done"]
    assert [episode.attempts for episode in episodes] == [1, 2, 2, 2, 1, 1]
    assert episodes[1].fault == "gave no answer in 1 s"
    assert "ended its process (exit code 3)" in episodes[2].fault
    assert episodes[3].fault.startswith(
        "returned a dict ({'does': 'nothing'}), and an agent returns its reward: a finite"
    )
    assert episodes[4].fault == "returned without asking the policy anything"


def test_two_agents_ask_at_once(run: Run, tmp_path: Path) -> None:
    """Each waits, between its two calls, until the other one has had an answer."""
    source = f"""
    def agent(row, base_url, api_key):
        first = said(ask(base_url, api_key, [user("play")]))
        open({str(tmp_path)!r} + f"/{{row['me']}}", "w").close()
        while not os.path.exists({str(tmp_path)!r} + f"/{{row['other']}}"):
            time.sleep(0.01)
        ask(base_url, api_key, [user("play"), first, user("again")])
    """
    rows = [{"me": "a", "other": "b"}, {"me": "b", "other": "a"}]

    episodes = run(ScriptedEngine(bpe(), counting), source, rows, timeout_seconds=20.0)

    assert [(episode.ended, episode.turn_count) for episode in episodes] == [("done", 2)] * 2
    waited = [episode.waited_seconds for episode in episodes]
    assert all(0 <= seconds < 20 for seconds in waited)


def test_agents_of_a_step_that_is_left_are_ended(run: Run) -> None:
    began = time.monotonic()

    (episode,) = run(
        ScriptedEngine(bpe(), counting),
        "def agent(row, base_url, api_key): time.sleep(600)",
        interrupted=lambda: time.monotonic() - began > 0.5,
    )

    assert (episode.ended, episode.finish) == ("aborted", Finish.ABORT)


def test_a_program_reads_its_row_and_has_address_and_key_in_its_environment(run: Run) -> None:
    source = """
    if __name__ == "__main__":
        import sys
        row = json.load(sys.stdin)
        ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], [user(row["question"])])
        sys.exit(row["code"])
    """
    rows = [{"question": "play", "code": 0}, {"question": "stay", "code": 4}]

    good, bad = run(ScriptedEngine(bpe(), counting), source, rows, command=["python", "agent.py"])

    assert (good.ended, good.reward, good.messages[0]["content"]) == ("done", 0.0, "play")
    assert (bad.ended, bad.attempts) == ("fault", 2)
    assert "python ended with exit code 4" in bad.fault


def test_a_program_beside_the_file_is_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/agent.sh").write_text("#!/bin/sh\nexec python agent.py\n")
    (tmp_path / "bin/agent.sh").chmod(0o755)
    source = """
    if __name__ == "__main__":
        ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], [user("play")])
    """

    (episode,) = run(ScriptedEngine(bpe(), counting), source, command=["bin/agent.sh"])

    assert (episode.ended, episode.fault) == ("done", "")


def test_max_tokens_cuts_an_answer_where_a_lower_limit_would_have(run: Run) -> None:
    engine = SpellingEngine(bpe(), lambda _: "hello")
    source = """
    async def agent(row, base_url, api_key):
        return ask(base_url, api_key, [user("play")], max_tokens=2)["choices"][0]["finish_reason"] == "length"
    """

    (episode,) = run(engine, source)

    (tokens,) = episode.samples
    assert episode.reward == 1.0
    assert text_of(engine, tokens.tokens[tokens.sampled]) == "he"
    assert episode.cut_turns == 1


def test_an_agent_that_takes_other_arguments_is_refused_before_it_runs(run: Run) -> None:
    with pytest.raises(
        ConfigError, match=r"agent in .*agent.py cannot be called with \(row, base_url, api_key\): too many"
    ):
        run(ScriptedEngine(bpe(), counting), "def agent(row): ...")


def test_what_is_no_request_for_a_completion_is_told_what_there_is() -> None:
    with Endpoint(SamplingConfig()) as endpoint:
        key = endpoint.open()
        asked = {
            "/models": (None, 200),
            "/completions": (b"{}", 404),
            "/chat/completions": (b"{", 400),
        }
        found = {}
        for path, (body, _) in asked.items():
            request = urllib.request.Request(endpoint.base_url + path, body, {"Authorization": f"Bearer {key}"})
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    found[path] = answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                found[path] = error.code, json.load(error)

    assert {path: status for path, (status, _) in found.items()} == {
        path: status for path, (_, status) in asked.items()
    }
    assert found["/models"][1]["data"][0]["id"] == "policy"
    assert found["/completions"][1]["error"]["message"] == (
        "there is no /v1/completions: this endpoint has POST /v1/chat/completions and GET /v1/models"
    )
    assert found["/chat/completions"][1]["error"]["message"].startswith("the body is no JSON (")


def test_a_call_under_way_when_the_endpoint_closes_is_refused() -> None:
    statuses: list[int] = []

    def ask(url: str, key: str) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
        try:
            urllib.request.urlopen(urllib.request.Request(url, body, {"Authorization": f"Bearer {key}"}), timeout=10)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)

    with Endpoint(SamplingConfig()) as endpoint:
        thread = threading.Thread(target=ask, args=(endpoint.base_url + "/chat/completions", endpoint.open()))
        thread.start()
        (call,) = endpoint.take(10.0)
        endpoint._calls.put(call)  # nobody samples it
    thread.join(10)

    assert statuses == [401]


NESTED = """
def nested(levels):
    value = {"type": "string"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}}
    return value
"""


def test_schemas_and_arguments_that_are_nested_too_deeply_are_refused_and_the_agent_may_go_on(
    run: Run, tmp_path: Path
) -> None:
    source = f"""
    {textwrap.indent(NESTED, " " * 4).strip()}
    def agent(row, base_url, api_key):
        tool = {{"type": "function", "function": {{"name": "add", "parameters": nested(row["levels"])}}}}
        call = {{"id": "1", "function": {{"name": "add", "arguments": json.dumps(nested(row["levels"]))}}}}
        called = {{"role": "assistant", "content": None, "tool_calls": [call]}}
        answers = [ask(base_url, api_key, [user("play")], tools=[tool])]
        answers.append(ask(base_url, api_key, [user("play"), called, user("go on")]))
        answers.append(ask(base_url, api_key, [user("play")]))
        json.dump(answers, open({str(tmp_path)!r} + f"/{{row['levels']}}.json", "w"))
    """

    episodes = run(ScriptedEngine(bpe(), counting), source, [{"levels": 450}, {"levels": 20}], max_length=4000)

    assert [(episode.ended, episode.turn_count) for episode in episodes] == [("done", 1), ("done", 3)]
    answers = json.loads((tmp_path / "450.json").read_text())
    assert [answer.get("error", {}).get("type") for answer in answers] == [*["invalid_request_error"] * 2, None]
    assert all("error" not in answer for answer in json.loads((tmp_path / "20.json").read_text()))


def test_a_call_that_cannot_be_written_or_answered_ends_its_own_episode_alone(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = copy.deepcopy(bpe())
    endless = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    tokenizer.chat_template = CHATML + f"{{% if messages[-1].content == 'endless' %}}{endless}{{% endif %}}"
    engine = ScriptedEngine(tokenizer, lambda text: "bad" if "say bad" in text else "good")
    source = """
    def agent(row, base_url, api_key):
        for content in row["asks"]:
            ask(base_url, api_key, [user(content)])
    """

    def decode(text: str) -> str:
        if text.startswith("bad"):
            raise kinds[0]("no such text")
        return text

    kinds: list[type[Exception]] = [ValueError]
    asks = [["play", "endless", "play"], *[["play", "say bad", "play"]] * 2, ["play", "play"]]
    rows = [{"asks": texts} for texts in asks]
    episodes = run(engine, source, rows, decode=decode)
    logged = capsys.readouterr().err
    kinds[0] = AssertionError

    assert [(episode.ended, episode.finish) for episode in episodes] == [
        ("done", Finish.STOP), ("fault", Finish.ERROR), ("fault", Finish.ERROR), ("done", Finish.STOP),
    ]  # fmt: skip
    assert [episode.turn_count for episode in episodes] == [2, 1, 1, 2]
    assert "ValueError" in episodes[1].fault
    assert logged.count("Traceback") == 1
    with pytest.raises(AssertionError):  # our own bug, which no request causes
        run(engine, source, rows, decode=decode)


def test_conversations_with_more_characters_than_an_episode_can_have_are_not_rendered(run: Run, tmp_path: Path) -> None:
    rendered: list[int] = []
    engine = ScriptedEngine(bpe(), counting)
    source = f"""
    def agent(row, base_url, api_key):
        long = {{"type": "function", "function": {{"name": "add", "description": "a" * 5000}}}}
        codes = []
        for messages, tools in (
            ([user("a" * 5000)], []), ([user("")] * 450, []), ([user("play")], [long]), ([user("play")], []),
        ):
            answer = ask(base_url, api_key, messages, tools=tools)
            codes.append(answer["error"]["code"] if "error" in answer else None)
        json.dump(codes, open({str(tmp_path / "codes.json")!r}, "w"))
    """

    class Counted(type(engine.tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
            rendered.append(max(len(str(message.get("content"))) for message in conversation) + len(conversation))
            return super().apply_chat_template(conversation, *args, **kwargs)

    engine.tokenizer.__class__ = Counted
    (episode,) = run(engine, source, max_characters=4000)

    too_long = "context_length_exceeded"
    assert json.loads((tmp_path / "codes.json").read_text()) == [too_long, too_long, too_long, None]
    assert (episode.ended, episode.turn_count) == ("done", 1)
    assert max(rendered) < 100


ODD: list[Any] = [5, None, "abc", [], [1], {}, {"a": 1}, True, -1.5, [[]], [None], {"role": 5}, "\ud800"]
WHOLE: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "b", "name": "c"},
        {"role": "assistant", "content": None, "reasoning_content": "d",
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "e", "arguments": '{"f": 1}'}}]},
        {"role": "tool", "content": "g", "tool_call_id": "1", "name": "e"},
    ],
    "tools": [{"type": "function", "function": {"name": "e", "description": "h",
               "parameters": {"type": "object", "properties": {"f": {"type": "integer"}}}}}],
    "max_tokens": 5, "temperature": 1.0, "stop": [], "logprobs": True, "seed": 1, "n": 1, "tool_choice": "auto",
}  # fmt: skip


def mutated(value: Any, generator: np.random.Generator) -> Any:
    """Return a value with one of its parts replaced."""
    if not isinstance(value, dict | list) or not value or generator.random() < 0.15:
        return copy.deepcopy(ODD[generator.integers(len(ODD))])
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, changed = keys[generator.integers(len(keys))], copy.deepcopy(value)
    changed[key] = mutated(value[key], generator)
    return changed


def test_whatever_a_body_holds_is_read_or_refused() -> None:
    generator, template = np.random.default_rng(0), ChatTemplate(bpe(), CHATML, {}, "it")
    refused = 0
    for _ in range(5000):
        body = mutated(mutated(WHOLE, generator) if generator.random() < 0.5 else WHOLE, generator)
        try:
            asked = chat_call(body, SamplingConfig())
        except CallRefused as refusal:
            refused += 1
            assert (refusal.status, bool(str(refusal))) == (400, True)
            continue
        json.dumps([asked.messages, asked.tools])
        template.text(Conversation(list(asked.messages), asked.tools))
    assert 1000 < refused < 4500


@pytest.mark.parametrize("length", ["9" * 5000, "9" * 12, "-1", "1e3", ""])
def test_a_length_that_is_none_is_told_so(length: str) -> None:
    with Endpoint(SamplingConfig()) as endpoint:
        host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as channel:
            head = f"Authorization: Bearer {endpoint.open()}\r\nContent-Length: {length}"
            channel.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode())
            answer = channel.makefile("rb").read().decode()

    assert answer.startswith("HTTP/1.1 400 ")
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["message"]


OPENAI = os.environ.get("HOLDFAST_OPENAI_PYTHON", "")
"""The Python of an environment that has `openai`."""


@pytest.mark.skipif(not OPENAI, reason="HOLDFAST_OPENAI_PYTHON names no Python with the openai package")
def test_openai_s_own_client_asks_and_goes_on_from_its_answers(run: Run, tmp_path: Path) -> None:
    script = ['<tool_call>\n{"name": "add_numbers", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "it is 3."]
    engine = ScriptedEngine(bpe(), lambda text: script[text.count("<|im_start|>assistant") - 1])
    source = f"""
    import asyncio, sys
    import openai
    row = json.load(sys.stdin)
    client = openai.AsyncOpenAI(max_retries=0)
    async def main():
        messages, kept = [user("1 + 2?")], []
        while len(messages) < 4:
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[{ADD!r}], logprobs=True, max_completion_tokens=200
            )
            choice = answer.choices[0]
            kept.append([choice.finish_reason, choice.token_ids, [item.logprob for item in choice.logprobs.content]])
            messages.append(choice.message)
            for call in choice.message.tool_calls or ():
                result = sum(json.loads(call.function.arguments).values())
                messages.append({{"role": "tool", "tool_call_id": call.id, "content": str(result)}})
        kept.append([model.id async for model in client.models.list()])
        for refused in (client, openai.AsyncOpenAI(api_key="none", max_retries=0)):
            try:
                await refused.chat.completions.create(model="policy", messages=[user("a")], stream=True)
            except (openai.BadRequestError, openai.AuthenticationError) as error:
                kept.append(error.body["message"])
        json.dump(kept, open({str(tmp_path / "kept.json")!r}, "w"))
    asyncio.run(main())
    """

    (episode,) = run(engine, source, command=[OPENAI, "agent.py"], max_length=800, timeout_seconds=60.0)

    assert (episode.ended, episode.fault) == ("done", "")
    (tokens,) = episode.samples
    first, second, models, streamed, keyless = json.loads((tmp_path / "kept.json").read_text())
    assert [first[0], second[0]] == ["tool_calls", "stop"]
    assert [*first[1], *second[1]] == tokens.tokens[tokens.sampled].tolist()
    assert [*first[2], *second[2]] == tokens.logprobs[tokens.sampled].tolist()
    assert models == ["policy"]
    assert streamed.startswith("stream=True is nothing that this endpoint does")
    assert keyless.startswith("there is no such session")


def test_requests_with_another_key_are_counted_in_the_metrics_of_an_episode(run: Run) -> None:
    engine = ScriptedEngine(bpe(), counting)
    source = """
    def agent(row, base_url, api_key):
        for guess in ("", "guess", "another"):
            ask(base_url, guess, [user("play")])
        ask(base_url, api_key, [user("play")])
    """

    (episode,) = run(engine, source)

    assert episode.info == {"refused_guesses": 3.0}
    assert episode.turn_count == 1
