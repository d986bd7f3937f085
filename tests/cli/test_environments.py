"""What an environment, a tool or a row lacks is told in one paragraph before step 1, with exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.fixtures import write_rows, write_run
from tests.cli.warm import WarmPython

FILES = {
    "tools.py": """
def untyped(a): ...
def add(a: int) -> int: return a
def addé(a: int) -> int: return a
""",
    "more.py": "def add(a: int) -> int: return a",
    "world.py": """
class Silent:
    def begin(self, row): return 7
    def step(self, turn): ...
class Asks:
    def begin(self, row): return row["question"]
    def step(self, turn): ...
class Long:
    def begin(self, row): return "b" * 900
    def step(self, turn): ...
class Both:
    def begin(self, row): ...
    def step(self, turn): ...
    def add(self, a: int) -> int: return a
WORLDS = {"silent": Silent, "asks": Asks}
class Lake:
    action_space = None
    def reset(self, seed): ...
    def step(self, action): ...
""",
    "plain.jinja": "{% for message in messages %}<bos>{{ message.role }}:{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}",
}
FILES["quoting.jinja"] = FILES["plain.jinja"].replace(
    "{{ message.content }}",
    "{% if loop.revindex < 3 %}{{ message.content }}{% else %}({{ message.content }}){% endif %}",
)
FILES["calls.jinja"] = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + FILES[
    "plain.jinja"
].replace(
    "<eos>",
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>",
)
FILES["thoughtless.jinja"] = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + FILES["calls.jinja"].replace(
        "{{ message.content }}",
        "{{ message.content.split('</think>')[-1] if loop.index0 < ns.last else message.content }}",
    )
)
TOOL = {"tools": "tools.py:add"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a tool without types": (
        {"environment": {"tools": "tools.py:untyped"}},
        "environment: parameter a of tool untyped has no type, and the model would not be told",
    ),
    "a name that the tokenizer cannot write": (
        {"environment": {"tools": "tools.py:addé"}},
        "environment: the tokenizer writes 'addé', the name of a tool, as 'add<unk>', and a policy could",
    ),
    "two tools of one name": (
        {"environment": {"tools": ["tools.py:add", "more.py:add"]}},
        "environment: two tools are called add, and a call would not say which. Rename one.",
    ),
    "a template without tools": (
        {"environment": TOOL, "data": {"chat_template": "plain.jinja"}},
        "leaves tools out of the prompt, so a policy cannot act by it. Set data.chat_template to a jinja file",
    ),
    "a template that rewrites earlier turns": (
        {"environment": {"path": "world.py:Silent"}, "data": {"chat_template": "quoting.jinja"}},
        "data.chat_template to a jinja file that writes a conversation turn by turn as it was said, or environment.his",
    ),
    "a template that drops thoughts at the user's next message, beside tools": (
        {"environment": {"path": "world.py:Both"}, "data": {"chat_template": "thoughtless.jinja"}},
        "data.chat_template to a jinja file that writes a conversation turn by turn as it was said, or environment.his",
    ),
    "no messages": (
        {"environment": {"path": "world.py:Silent"}},
        "it returned a int (7), which is neither text nor a list of messages (role and content). The row's columns are",
    ),
    "a row without its columns": (
        {"environment": {"path": "world.py:Asks"}},
        "it raised KeyError: 'question' (world.py:6). The row's columns are prompt, answer. Correct the class, or the",
    ),
    "more tokens than there is room for": (
        {"environment": {"path": "world.py:Long"}},
        " tokens for a row of the first batch, and data.max_length=448 leaves no room for a turn of 8 behind them.",
    ),
    "a row that names no environment of several": (
        {"environment": {"path": "world.py:WORLDS"}},
        "has no column environment, and there is silent, asks. Correct the row, or what environment.path names.",
    ),
    "an environment of gymnasium without its action": (
        {"environment": {"path": "world.py:Lake"}},
        "is an environment of gymnasium, which takes actions, and a turn is text. Set environment.action to a function",
    ),
    "an agent that is not there": (
        {"environment": {"kind": "endpoint", "run": "world.py:agent"}},
        "world.py has no function agent. It has Silent, Asks, Long, Both, Lake.",
    ),
    "a program that is not there": (
        {"environment": {"kind": "endpoint", "command": ["nope", "--key", "planted"]}},
        "environment.command: nope ",
    ),
    "a program beside the file that is not executable": (
        {"environment": {"kind": "endpoint", "command": ["./world.py"]}},
        "environment.command: ./world.py ",
    ),
    "an agent that takes a row alone": (
        {"environment": {"kind": "endpoint", "run": "more.py:add"}},
        " cannot be called with (row, base_url, api_key): too many positional arguments. Write `def agent(row, base",
    ),
    "an agent and turns with returns of their own": (
        {"environment": {"kind": "endpoint", "command": ["agent"]}, "advantage": {"turns": "discounted"}},
        "advantage.turns: an agent may ask several things at once, which have no order; use episode",
    ),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_keeps_an_episode_from_beginning_is_one_paragraph(
    name: str, warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}] * 12)
    tree["model"]["config"]["max_position_embeddings"] = 512
    tree |= {"reward": "exact", "rollout": {"max_new_tokens": 8, "group_size": 2}}
    tree["data"] |= {"max_length": 448, "tokens_per_micro_batch": 1024}
    tree["launch"]["ranks"] = 1
    changes, message = REFUSED[name]
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    write_run(tmp_path / "run.yaml", tree)

    done = warm.run("-m", "holdfast.cli.main", "grpo", "run.yaml", cwd=tmp_path)

    assert done.code == 2, done.err
    assert message in done.err
    assert "planted" not in done.err
    assert "Traceback" not in done.err
    assert len([line for line in done.err.splitlines() if line.strip()]) == 1, done.err
    assert not (tmp_path / "runs").exists()
