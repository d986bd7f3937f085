"""Real processes of environments that hang, die, fork, print, lie and never end: each request gets one answer."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import patience
from holdfast.config.sections.environment import EnvironmentConfig
from holdfast.environments.base import ToolCall, Turn
from holdfast.environments.pool import Answer, EnvironmentPool
from holdfast.errors import ConfigError, RunStopped
from holdfast.processes import framing
from holdfast.processes.forks import Work, Worker
from holdfast.processes.server import ForkServer
from tests.environments.conftest import Start
from tests.rewards.conftest import is_alive, wait_for

GAME = '''
    import random
    from holdfast.environments.base import Observation
    class World:
        replayable = True
        def __init__(self, most=10):
            self.most = most
        def begin(self, row):
            self.target = row["target"]
            self.drawn = random.randint(0, 10**9)
            return f"guess up to {self.most}, {self.drawn}"
        def step(self, turn):
            right = turn.text == str(self.target)
            return Observation("" if right else "wrong", 1.0 if right else -0.25, right, {"turn": turn.number})
        def add(self, a: int, b: int = 1) -> int:
            """Add two numbers.

            Args:
                a: The first
                    of two.
            """
            return a + b
'''


def answer(pool: EnvironmentPool) -> Answer:
    (found,) = pool.answers(None)
    return found


def in_begin(body: str, *, before: str = "") -> str:
    lines = textwrap.indent(textwrap.dedent(body).strip(), " " * 12)
    return f"{before}\n    class World:\n        def begin(self, row):\n{lines}\n        def step(self, turn): ..."


def after(pool: EnvironmentPool, row: dict[str, Any] | None = None) -> Answer:
    pool.begin(0, row or {}, 5)
    return answer(pool)


def test_an_episode_begins_with_its_row_and_steps_until_it_is_done(start: Start) -> None:
    pool = start(GAME, kwargs={"most": 7})

    pool.begin(3, {"target": 4}, seed=11)
    begun = answer(pool)
    pool.take(3, Turn(0, "5"))
    wrong = answer(pool)
    pool.take(3, Turn(1, "4"))
    right = answer(pool)

    assert pool.replayable
    assert begun.result is not None
    assert begun.result.messages[0]["content"].startswith("guess up to 7, ")
    assert wrong.result is not None
    assert (wrong.result.messages, wrong.result.reward) == (({"role": "user", "content": "wrong"},), -0.25)
    assert right.result is not None
    assert (right.result.reward, right.result.done, right.result.info) == (1.0, True, {"turn": 1.0})
    assert right.episode == 3


def test_equal_seeds_draw_equal_numbers_in_any_process(start: Start) -> None:
    pool = start(GAME)

    said = []
    for episode, seed in enumerate((8, 8, 9)):
        pool.begin(episode, {"target": 1}, seed)
        found = answer(pool).result
        assert found is not None
        said.append(found.messages[0]["content"])

    assert said[0] == said[1] != said[2]


def test_public_methods_with_types_are_tools(start: Start) -> None:
    pool = start(GAME)

    pool.begin(0, {"target": 1}, 5)
    answer(pool)
    calls = [
        ToolCall("add", {"a": 2, "b": 3}),
        ToolCall("add", {"a": "2"}),
        ToolCall("sub", {}),
        ToolCall("add", {}, "it is no JSON"),
        ToolCall("add", {"a": 1, "c": 1}),
    ]
    pool.take(0, Turn(0, "", tuple(calls)))
    found = answer(pool).result

    assert [tool["function"]["name"] for tool in pool.tools[""]] == ["add"]
    assert pool.tools[""][0]["function"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "The first of two."}, "b": {"type": "integer"}},
            "required": ["a"],
        },
        "return": {"type": "integer"},
    }
    assert found is not None
    assert [message["content"] for message in found.messages] == [
        "5",
        "error: a of add should be integer, not '2'",
        "error: there is no tool sub; there is add",
        "error: it is no JSON",
        "error: add has no parameter c; it takes a, b",
    ]
    assert {message["role"] for message in found.messages} == {"tool"}
    assert (found.called, found.failed_calls, found.done) == ({"add": 4, "unknown": 1}, 4, False)


def test_functions_alone_are_an_environment(start: Start, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def half(a: float) -> float:\n    '''Halve.'''\n    return a / 2 / (a != 0)\n")
    pool = start("", path=None, tools="tools.py:half")

    pool.begin(0, {}, 5)
    begun = answer(pool).result
    pool.take(0, Turn(0, "", (ToolCall("half", {"a": 3}), ToolCall("half", {"a": 0}))))
    called = answer(pool).result
    pool.take(0, Turn(1, "one and a half"))
    ended = answer(pool).result

    assert begun is not None
    assert begun.messages == ()
    assert called is not None
    assert [message["content"] for message in called.messages] == [
        "1.5",
        "error: ZeroDivisionError: float division by zero",
    ]
    assert ended is not None
    assert ended.done


def sends(payload: str) -> str:
    """Return an environment that writes an answer of its own, given as an expression, into its worker's channel."""
    return in_begin(f"""
        import json, os
        from holdfast.environments.base import StepResult
        payload = {payload}
        numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2]
        links = {{n: os.readlink(f"/proc/self/fd/{{n}}") for n in numbers if os.path.lexists(f"/proc/self/fd/{{n}}")}}
        channel = next(number for number, link in links.items() if link.startswith("socket:"))
        os.write(channel, len(payload).to_bytes(8, "little") + payload)
        return "x"
    """)


WRITES_EVERYWHERE = """
    import os
    for number in range(3, 40):
        try:
            os.write(number, b"garbage" * 9)
        except OSError:
            pass
"""
HOSTILE = {
    "hangs": (in_begin("import time\ntime.sleep(600)"), "timeout", "gave no answer in 1 s"),
    "dies": (in_begin("import os\nos.abort()"), "died", "ended its process (signal 6)"),
    "leaves": (in_begin("import sys\nsys.exit(3)"), "raised", "SystemExit: 3"),
    "raises": (in_begin("return row['question']"), "raised", "raised KeyError: 'question' (world.py:4)"),
    "garbage": (in_begin("return 7"), "malformed", "returned a int (7), which is neither text nor a list of messages"),
    "memory": (in_begin("return 'x' * (1 << 33)"), "raised", "MemoryError"),
    "deep": (
        in_begin("""
        import sys
        sys.setrecursionlimit(10**6)
        value = []
        for _ in range(3000): value = [value]
        return [{"role": "user", "content": "x", "more": value}]
        """),
        "malformed",
        "nested",
    ),
    **{
        name: (sends(payload), "died", "wrote into the channel of its worker")
        for name, payload in {
            "deep bytes": """b'{"result": ' + b"[" * 3000 + b"]" * 3000 + b"}" """,
            "no result": """b'{"result": 7}'""",
            "half a fault": """b'{"fault": "raised"}'""",
            "unknown field": """b'{"result": {"messages": ["a"], "bogus": 1}}'""",
            "no message": """json.dumps({"result": {**vars(StepResult()), "messages": [5]}}).encode()""",
        }.items()
    },
    "cycle": (
        in_begin("""
        message = {"role": "user", "content": "x"}
        message["more"] = [message, message, message]
        return [message]
        """),
        "malformed",
        "nested",
    ),
    "long": (in_begin("return 'x' * (1 << 24)"), "malformed", "bytes, and an observation has 16777216 at most"),
    "no json": (
        in_begin("return [{'role': 'user', 'content': 'x', 'when': object()}]"),
        "malformed",
        "returned a message with a value that is no JSON: TypeError: Object of type object is not JSON serializable",
    ),
    "channel": (in_begin(WRITES_EVERYWHERE), "died", "wrote into the channel"),
    "closes": (in_begin("import os\nos.closerange(0, 64)"), "died", "ended its process"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_goes_wrong_is_answered_and_the_next_episode_is_well(start: Start, name: str) -> None:
    source, fault, message = HOSTILE[name]
    may_be_well = "begin(self, row):\n            if row.get('well'): return 'well'"
    pool = start(
        source.replace("begin(self, row):", may_be_well),
        timeout_seconds=1 if fault == "timeout" else 30,
        memory_mib=2048,
    )

    found = after(pool)
    pool.leave(0)
    pool.begin(1, {"well": True}, 5)
    well = answer(pool)

    assert (found.fault, found.result) == (fault, None)
    assert message.replace(":4)", ":5)") in found.message
    assert well.result is not None
    assert well.result.messages[0]["content"] == "well"


def test_what_an_environment_forked_ends_with_it(start: Start, tmp_path: Path) -> None:
    body = f"""
        import subprocess
        pids = [subprocess.Popen(["sleep", "600"], start_new_session=own).pid for own in (False, True)]
        open({str(tmp_path / "pids")!r}, "w").write(" ".join(map(str, pids)))
        return "ready"
    """
    pool = start(in_begin(body))

    assert after(pool).result is not None
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(is_alive, pids))
    pool.leave(0)

    assert wait_for(lambda: not any(map(is_alive, pids)))


def test_a_fork_that_comes_back_answers_nothing(start: Start) -> None:
    pool = start(in_begin("import os\nos.fork()\nreturn 'once'"))

    assert after(pool).result is not None
    assert pool.answers(0.5) == []


def test_a_gigabyte_of_print_fills_no_disk(start: Start) -> None:
    pool = start(in_begin("for _ in range(1024): print('x' * (1 << 20))\nreturn 'ready'"), timeout_seconds=120)

    found = after(pool)

    assert found.result is not None
    assert wait_for(lambda: pool.log_path.stat().st_size < 1 << 27, 3)


def test_an_environment_that_dies_between_turns_is_told_at_the_next(start: Start) -> None:
    body = "import os, threading\nthreading.Timer(0.05, lambda: os._exit(4)).start()\nreturn str(os.getpid())"
    pool = start(in_begin(body))

    begun = after(pool).result
    assert begun is not None
    pid = int(begun.messages[0]["content"])
    assert wait_for(lambda: not is_alive(pid), 30)
    pool.take(0, Turn(0, "hello"))

    assert answer(pool).fault == "died"


def test_half_of_a_surrogate_pair_reaches_no_tokenizer(start: Start) -> None:
    pool = start("""
        class World:
            def begin(self, row):
                return "half \\ud83d, whole \\ud83d\\ude00"
            def echo(self, text: str) -> str:
                return text
    """)

    begun = after(pool).result
    pool.take(0, Turn(0, "", (ToolCall("echo", {"text": "\ud83d x"}), ToolCall("sub\ud83d", {}))))
    called = answer(pool).result

    assert begun is not None
    assert called is not None
    assert begun.messages[0]["content"] == "half \ufffd, whole \U0001f600"
    assert called.messages[0]["content"] == "\ufffd x"
    assert called.messages[1]["name"] == "sub\ufffd"


def test_an_environment_that_talks_without_end_while_it_closes_is_ended(start: Start) -> None:
    pool = start("""
        import os
        class World:
            def begin(self, row):
                return str(os.getpid())
            def step(self, turn): ...
            def close(self):
                links = {n: f"/proc/self/fd/{n}" for n in range(3, 40) if os.path.exists(f"/proc/self/fd/{n}")}
                channel = next(n for n, link in links.items() if "socket" in os.readlink(link))
                while True: os.write(channel, b"\\2" + bytes(7) + b"{}")
        """)  # fmt: skip
    begun = after(pool).result
    assert begun is not None

    pool.leave(0)
    pool.begin(1, {}, 5)

    assert answer(pool).result is not None
    assert wait_for(lambda: not is_alive(int(begun.messages[0]["content"])), 30)
    pool.begin(2, {}, 5)
    assert answer(pool).result is not None


def test_a_worker_that_ended_when_its_time_did_gives_one_answer(tmp_path: Path) -> None:
    # Before the sockets: the kernel closes a new program's files a moment after it lets this process go on.
    pid = os.posix_spawnp("sleep", ["sleep", "600"], os.environ, setpgroup=0)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.close()
    (requests, _), (replies, replying) = os.pipe(), os.pipe()
    server = ForkServer(Work({}, lambda *_: None, lambda _: False), requests, replying)
    server._workers[pid] = Worker(pid, 4, ours, missing=1, deadline=time.monotonic() - 1)
    server._selector.register(ours, selectors.EVENT_READ)

    server._end_the_overdue()
    server._flush()

    answers = list(framing.MessageReader().feed(os.read(replies, 1 << 16)))
    assert [json.loads(message)["fault"] for message in answers] == ["died"]


def test_a_supervisor_that_hangs_ends_the_run_however_often_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        patience, "current", replace(patience.current, sign_of_life_seconds=0.1, pool_close_seconds=0.1)
    )
    (tmp_path / "world.py").write_text(textwrap.dedent(in_begin("import time\ntime.sleep(600)")))
    config = EnvironmentConfig(path="world.py:World")
    pool = EnvironmentPool(config, tmp_path, tmp_path / "logs", silent_seconds=1.5)
    pool.start()
    supervisor = pool._process
    assert supervisor is not None

    assert [pool.answers(0.1) for _ in range(18)] == [[]] * 18, "it is asked nothing, and says nothing"
    pool.begin(0, {}, 5)
    assert [pool.answers(0.1) for _ in range(18)] == [[]] * 18, "it gives signs of life"
    os.kill(supervisor.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    with pytest.raises(RunStopped, match="have said nothing for 1.5 s"):
        while time.monotonic() < stopped + 10:
            pool.answers(0.1)

    assert time.monotonic() - stopped < 5


def test_nothing_is_left_when_the_pool_closes(start: Start, tmp_path: Path) -> None:
    body = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    pool = start(in_begin(body))
    pool.begin(0, {}, 5)
    assert wait_for(lambda: (tmp_path / "pid").is_file() and bool((tmp_path / "pid").read_text()))

    pool.close()

    assert wait_for(lambda: not is_alive(int((tmp_path / "pid").read_text())))


def test_workers_import_no_torch(start: Start) -> None:
    found = after(
        start(in_begin("import sys\nreturn str(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"))
    )

    assert found.result is not None
    assert found.result.messages[0]["content"] == "[]"


REFUSED = {
    "no types": ("def add(a, b: int): ...", "parameter a of tool add has no type"),
    "strange type": ("def add(a: object): ...", "parameter a of tool add is <class 'object'>"),
    "yields": ("def add(a: int): yield a", "tool add is a generator, and what a policy reads is returned"),
    "many": ("def add(*a: int): ...", "tool add takes *a: int, and a tool is called by the names"),
    "absent": ("def sub(a: int): ...", "has no function add. It has sub"),
    "raises": ("import nothing_like_it", "raises when it is imported: ModuleNotFoundError"),
    "ends": ("import os; os._exit(3)", "importing its file ended the process"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tool_that_cannot_be_called_is_refused(start: Start, tmp_path: Path, name: str) -> None:
    (tmp_path / "tools.py").write_text(REFUSED[name][0])

    with pytest.raises(ConfigError) as error:
        start("", path=None, tools="tools.py:add")

    assert str(error.value).startswith("environment: ")
    assert REFUSED[name][1] in str(error.value)


def test_two_tools_of_one_name_and_a_class_without_a_world_are_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def add(a: int) -> int: ...")

    with pytest.raises(ConfigError, match="two tools are called add"):
        start(GAME, tools="tools.py:add")
    with pytest.raises(ConfigError, match="has neither begin nor reset"):
        start("class World: ...")
    with pytest.raises(ConfigError, match="has no step and no public method"):
        start("class World:\n    def begin(self, row): ...")
    with pytest.raises(ConfigError, match="has neither begin nor reset"):
        start("def World(): ...")
    with pytest.raises(ConfigError, match="World in .* raises TypeError: .* when it is called"):
        start("def World(size): ...")
    with pytest.raises(ConfigError, match="World in .* is empty"):
        start("World = {}")
    with pytest.raises(ConfigError, match="a in .* is 7, which makes no environment"):
        start("World = {'a': 7}")
