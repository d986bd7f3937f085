"""Reward functions that hang, die, print and fork: what is counted, who is named, what is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import pytest

from holdfast.config.sections.reward import FormatConfig, RewardPoolConfig
from holdfast.errors import ConfigError, RunStopped
from holdfast.rewards.base import SampleOutcome
from holdfast.rewards.pool import RewardPool
from tests.rewards.conftest import Start, is_alive, sample, samples, user, wait_for

SLEEPS = """
    import os, subprocess, sys, time
    from pathlib import Path
    def note(pid): (Path(__file__).parent / f"pid-{pid}").touch()
"""


def noted(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def test_a_hung_sample_is_killed_and_named_and_the_others_are_unaffected(start: Start) -> None:
    pool = start("""
        import time
        def reward(completion):
            if completion.startswith("slow"): time.sleep(60)
            return len(completion)
        """, timeout_seconds=1, workers=1)  # fmt: skip
    asked = samples("a", "slow " * 30, "slow too", "cc", "e", "ff", "g", "hh")

    found = pool.score(asked)

    assert [each.reward for each in found] == [1.0, None, None, 2.0, 1.0, 2.0, 1.0, 2.0]
    assert [each.fault for each in found] == [None, "timeout", "timeout", None, None, None, None, None]
    assert found[1].drop == "sample"
    assert found[1].message == f"reward reward gave no answer in 1 s; sample 1: {('slow ' * 30)[:77] + '...'!r}"


def test_a_hung_sample_of_a_batch_is_found_by_asking_one_by_one(start: Start) -> None:
    pool = start("""
        import time
        def reward(completions):
            if "slow" in completions: time.sleep(60)
            return [len(each) for each in completions]
        """, timeout_seconds=1, batch_size=2)  # fmt: skip

    found = pool.score(samples("a", "slow", "cc", "d"))

    assert [(each.reward, each.fault) for each in found] == [(1, None), (None, "timeout"), (2, None), (1, None)]


@pytest.mark.parametrize("pause", ["await asyncio.sleep(60)", "time.sleep(60)"])
def test_a_hung_coroutine_is_found(start: Start, pause: str) -> None:
    pool = start(f"""
        import asyncio, time
        async def reward(completion):
            if completion == "slow": {pause}
            return len(completion)
        """, timeout_seconds=1)  # fmt: skip

    found = pool.score(samples("a", "slow", "cc", "d"))

    assert [(each.reward, each.fault) for each in found] == [(1, None), (None, "timeout"), (2, None), (1, None)]


def test_a_timeout_can_drop_the_group_or_stand_for_a_value(start: Start) -> None:
    source = "import time\ndef reward(completion): time.sleep(60)"

    group = start(source, timeout_seconds=0.2, on_timeout="drop_group").score([sample()])[0]
    value = start(source, user(weight=2.0), timeout_seconds=0.2, on_timeout=-1.0).score([sample()])[0]

    assert (group.reward, group.fault, group.drop) == (None, "timeout", "group")
    assert (value.reward, value.fault, value.drop, value.parts) == (-2.0, "timeout", None, {"reward": -1.0})


def test_each_sample_has_its_own_time(start: Start) -> None:
    """Together those of a task take longer than the limit of one."""
    pool = start("import time\ndef reward(completion): time.sleep(0.25); return 1", workers=1, timeout_seconds=0.7)

    assert [each.reward for each in pool.score(samples(*"abcdefghijklmnop"))] == [1.0] * 16


def test_a_batched_call_has_the_time_of_its_samples(start: Start) -> None:
    pool = start(
        "import time\ndef reward(completions): time.sleep(0.8); return [len(completions)] * len(completions)",
        timeout_seconds=0.4,
    )

    assert [each.reward for each in pool.score(samples(*"abcd"))] == [4.0] * 4


@pytest.mark.parametrize(
    ("death", "said"),
    [
        ("os._exit(3)", "killed its worker (exit code 3)"),
        ("os.kill(os.getpid(), 11)", "killed its worker (signal 11)"),
        ("os.kill(os.getpid(), 9)", "killed its worker (signal 9, perhaps for want of memory)"),
        ("os.closerange(3, 100)", "killed its worker"),
    ],
)
@pytest.mark.parametrize("form", ["def reward(completion): return act([completion])[0]",
                                  "def reward(completions): return act(completions)",
                                  "async def reward(completion): return act([completion])[0]"])  # fmt: skip
def test_a_dead_worker_is_an_error_of_its_sample_and_is_replaced(
    start: Start, form: str, death: str, said: str
) -> None:
    pool = start(f"""
        import os
        def act(completions):
            if "die" in completions: {death}
            return [len(each) for each in completions]
        {form}
        """, workers=1)  # fmt: skip

    found = pool.score(samples("a", "bb", "die", "cc", "d"))
    again = pool.score(samples("a", "bb"))

    assert [each.reward for each in found] == [1.0, 2.0, None, 2.0, 1.0]
    assert [each.reward for each in again] == [1.0, 2.0]
    assert found[2].fault == "error"
    assert said in found[2].message


def test_what_a_hung_function_started_dies_with_it(start: Start, tmp_path: Path) -> None:
    """Also a grandchild that started a session of its own."""
    pool = start(SLEEPS + """
    def reward(completion):
        note(os.getpid())
        for own_session in (False, True):
            note(subprocess.Popen(["sleep", "600"], start_new_session=own_session).pid)
        child = os.fork()
        if child == 0:
            os.setsid()
            note(subprocess.Popen(["sleep", "600"]).pid)
        time.sleep(600)
    """, timeout_seconds=0.5)  # fmt: skip

    found = pool.score([sample()])[0]

    assert found.fault == "timeout"
    assert len(noted(tmp_path)) == 4
    assert not [pid for pid in noted(tmp_path) if is_alive(pid)]


def test_an_orphan_is_gone_before_the_next_sample(start: Start) -> None:
    pool = start(SLEEPS + """
    def reward(completion):
        note = Path(__file__).parent / "orphan"
        if completion == "first":
            note.write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
            time.sleep(600)
        return not Path("/proc", note.read_text()).exists()
    """, timeout_seconds=1, workers=1)  # fmt: skip

    assert [each.reward for each in pool.score(samples("first", "second"))] == [None, 1.0]


def test_a_fork_bomb_ends_with_its_sample(start: Start, tmp_path: Path) -> None:
    pool = start(SLEEPS + """
    def reward(completion):
        if completion != "bomb": return 1
        for generation in range(5):
            os.fork()
        note(os.getpid())
        time.sleep(600)
    """, timeout_seconds=2)  # fmt: skip

    found = pool.score(samples("bomb", "good"))

    assert [(each.reward, each.fault) for each in found] == [(None, "timeout"), (1.0, None)]
    assert len(noted(tmp_path)) == 32
    assert not [pid for pid in noted(tmp_path) if is_alive(pid)]


def test_a_child_that_comes_back_from_a_function_gives_no_second_answer(start: Start) -> None:
    pool = start("import os\ndef reward(completion): os.fork(); return len(completion)", workers=1)

    assert [each.reward for each in pool.score(samples(*"abcdefghijklmnop"))] == [1.0] * 16


def test_what_a_finished_function_leaves_running_ends_with_the_pool(start: Start, tmp_path: Path) -> None:
    pool = start(SLEEPS + """
    def reward(completion):
        note(subprocess.Popen(["sleep", "600"]).pid)
        return 1
    """)  # fmt: skip
    pool.score([sample()])
    running = [is_alive(pid) for pid in noted(tmp_path)]

    pool.close()

    assert running == [True]
    assert not is_alive(noted(tmp_path)[0])


def test_megabytes_of_print_go_to_the_log(start: Start) -> None:
    pool = start("""
        import os, sys
        print("while imported")
        def reward(completion):
            print("x" * 3_000_000)
            os.write(1, b"\\0straight to the descriptor" * 1000)
            os.system("echo from a shell")
            print("to stderr", file=sys.stderr)
            print(input() if False else sys.stdin.read())
            return len(completion)
        """)  # fmt: skip

    found = pool.score(samples("a", "bb", "ccc"))

    log = pool.log_path.read_bytes()
    assert [each.reward for each in found] == [1.0, 2.0, 3.0]
    assert len(log) > 9_000_000
    for text in (b"while imported", b"straight to the descriptor", b"from a shell", b"to stderr"):
        assert text in log


def test_the_log_has_a_longest_length(start: Start) -> None:
    pool = start(
        "import os\ndef reward(completion):\n    for _ in range(70): os.write(1, b'x' * (1 << 20))\n    return 1"
    )

    pool.score([sample()])
    pool.score([sample()])

    assert pool.log_path.stat().st_size <= 71 << 20


def test_a_function_that_closes_its_output_still_scores(start: Start) -> None:
    pool = start("import os, sys\ndef reward(completion): sys.stdout.close(); return os.getpid()", workers=1)

    first, second = pool.score(samples("a", "b"))

    assert first.reward == second.reward is not None


def test_answers_keep_the_order_of_the_samples(start: Start) -> None:
    pool = start("""
        import time
        def reward(sample_id):
            time.sleep(0.02 * (7 - sample_id % 8))
            return sample_id
        """, workers=4)  # fmt: skip

    assert [each.reward for each in pool.score(samples(*"abcdefghijklmnop"))] == list(range(16))


def test_random_rewards_repeat_for_any_number_of_workers(start: Start) -> None:
    source = """
        import random, numpy
        def reward(completion): return {"reward": random.random() + numpy.random.rand(), "hash": hash("text")}
        """
    first, second = start(source, workers=1), start(source, workers=3)

    once = [each.parts for each in first.score(samples(*"abcdef"))]
    again = [each.parts for each in first.score(samples(*"abcdef"))]
    elsewhere = [each.parts for each in second.score(samples(*"abcdef"))]

    assert once == again == elsewhere
    assert len({part["reward"] for part in once}) == 6


def test_no_samples_are_no_work(start: Start) -> None:
    assert start("def reward(completion): return 1").score([]) == []


def test_slow_imports_take_no_time_from_samples(start: Start) -> None:
    pool = start("import time\ntime.sleep(1.5)\ndef reward(completion): return 1", timeout_seconds=1)

    assert pool.score([sample()])[0].reward == 1.0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("\n\nimport no_such_library\ndef reward(completion): return 1",
         r"my.py raises when it is imported: ModuleNotFoundError: No module named 'no_such_library' \(line 3\). "
         "Correct the file, or install what it needs"),
        ("def reward(completion) return 1", r"SyntaxError: .*\(line 1\)"),
        ("raise SystemExit(2)", "raises when it is imported: SystemExit: 2"),
        (r"print('too\n \33[2Jmuch\n')" "\nimport os, sys; sys.stdout.flush(); os._exit(5)",
         r"importing its file ended the process with exit code 5. It printed last: too \|  \\x1b\[2Jmuch. Import the"),
        ("import os; os._exit(5)", "importing its file ended the process with exit code 5. Import the file in"),
        ("import os; os.kill(os.getpid(), 11)", "ended the process with signal 11"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), name='poll', daemon=True).start()",
         r"starts a thread when it is imported \(poll\).*Start it on the first call"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_import_is_told_in_a_paragraph(start: Start, source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)^reward reward: .*{said}"):
        start(source)


def test_an_import_that_never_ends_is_told_in_a_paragraph(start: Start) -> None:
    with pytest.raises(ConfigError, match="reward reward: its file is still being imported after 1 s"):
        start("import time; time.sleep(600)", start_timeout_seconds=1)


def test_a_missing_file_is_told_with_the_places_searched(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        start("", user("gone/file.py:f"))

    assert f"there is no file gone/file.py beside the YAML ({tmp_path}) or in {Path.cwd()}" in str(raised.value)


def test_a_reward_may_be_a_function_of_a_package(start: Start, tmp_path: Path) -> None:
    package = tmp_path / "own_scores"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "factor.py").write_text("FACTOR = 3\n")
    (package / "words.py").write_text(
        "from own_scores.factor import FACTOR\ndef long(completion, plus): return FACTOR * len(completion) + plus\n"
    )

    pool = start("", user("own_scores.words:long", kwargs={"plus": 1}))

    assert [scored.reward for scored in pool.score(samples("ab", "c"))] == [7.0, 4.0]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("own_gone.words:long", "own_gone.words raises when it is imported: ModuleNotFoundError: No module named"),
        ("json.decoder:absent", "decoder.py has no function absent. It has .*JSONDecoder"),
    ],
)
def test_a_module_without_the_function_is_told(start: Start, path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        start("", user(path))


def test_workers_come_back_after_a_silent_death_between_requests(start: Start, tmp_path: Path) -> None:
    pool = start(SLEEPS + """
    def reward(completion):
        note(os.getpid())
        return 1
    """, workers=1)  # fmt: skip
    pool.score([sample()])
    (pid,) = noted(tmp_path)
    os.kill(pid, 9)
    assert wait_for(lambda: not is_alive(pid))

    assert pool.score([sample()])[0].reward == 1.0
    assert len(noted(tmp_path)) == 2


@pytest.mark.parametrize("form", ["def reward(completion, sample_id): return act([completion], sample_id)[0]",
                                  "def reward(completions): return act(completions, 0)",
                                  "async def reward(completion): return act([completion], 0)[0]"])  # fmt: skip
def test_a_worker_killed_from_outside_costs_no_sample(start: Start, tmp_path: Path, form: str) -> None:
    """The rewards are those of an undisturbed pool, to the last bit: of a batch, drawn for the same batch."""
    source = (
        SLEEPS
        + f"""
    import random
    def act(completions, sample_id):
        if completions[0] == "wait" and not (Path(__file__).parent / "calm").exists() and not noted():
            note(os.getpid())
            time.sleep(600)
        return [random.random() * len(completions) for each in completions]
    def noted(): return list(Path(__file__).parent.glob("pid-*"))
    {form}
    """
    )
    asked = samples("wait", "b", "c", "d", "e", "f")
    (tmp_path / "calm").touch()
    undisturbed = [each.reward for each in start(source, workers=1, batch_size=3).score(asked)]
    (tmp_path / "calm").unlink()
    pool = start(source, workers=1, batch_size=3)
    killer = Thread(target=lambda: wait_for(lambda: bool(noted(tmp_path))) and os.kill(noted(tmp_path)[0], 9))
    killer.start()

    found = pool.score(asked)
    killer.join()

    assert len(noted(tmp_path)) == 1
    assert [each.fault for each in found] == [None] * 6
    if "async" not in form:  # those of one batch draw from one generator, in the order in which they wake
        assert [each.reward for each in found] == undisturbed


def test_a_sample_whose_worker_is_killed_twice_is_dropped(start: Start, tmp_path: Path) -> None:
    pool = start(SLEEPS + """
    def reward(completion):
        if completion == "die":
            note(os.getpid())
            os.kill(os.getpid(), 9)
        return 1
    """, workers=1)  # fmt: skip

    found = pool.score(samples("a", "die", "b"))

    assert [each.reward for each in found] == [1.0, None, 1.0]
    assert "killed its worker (signal 9, perhaps for want of memory)" in found[1].message
    assert len(noted(tmp_path)) == 2


def test_the_death_of_the_supervisor_stops_the_run_with_a_sentence(start: Start, tmp_path: Path) -> None:
    pool = start(SLEEPS + """
    def reward(completion):
        note(os.getpid())
        os.kill(os.getppid(), 9)
        time.sleep(60)
    """)  # fmt: skip
    begun = time.monotonic()
    pool.log_path.rename(tmp_path / "moved")  # as the logs are when a run directory is made

    words = r"The reward processes died with signal 9\. Read logs/rewards-.* in the run's directory, then start the run"
    with pytest.raises(RunStopped, match=words):
        pool.score([sample()])

    assert time.monotonic() - begun < 10
    assert wait_for(lambda: not any(map(is_alive, noted(tmp_path))))


def test_a_step_of_hung_rewards_ends_in_time_and_counts_what_has_no_score(start: Start, tmp_path: Path) -> None:
    """One by one, forty of them would take six minutes and a half."""
    pool = start(SLEEPS + """
    def reward(completion):
        if completion == "good": return 1
        note(os.getpid())
        time.sleep(600)
    """, user(), FormatConfig(regex="good"), step_timeout_seconds=2)  # fmt: skip
    begun = time.monotonic()

    found = pool.score(samples("good", *["slow"] * 40))
    took = time.monotonic() - begun
    again = pool.score(samples("good"))

    assert took < 8
    assert (found[0].reward, found[0].fault) == (2.0, None)
    assert {each.fault for each in found[1:]} == {"timeout"}
    assert (
        "reward reward had no answer when all of them had taken 2 s (rewards.step_timeout_seconds)" in found[9].message
    )
    assert not [pid for pid in noted(tmp_path) if is_alive(pid)]
    assert again[0].reward == 2.0


TRACER = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE = 0x4206
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
seized = libc.ptrace(PTRACE_SEIZE, int(open(sys.argv[1]).read()), None, None)
open(sys.argv[2], "w").write("yes" if seized == 0 else os.strerror(ctypes.get_errno()))
time.sleep(600)
"""


@pytest.mark.slow
def test_a_worker_that_cannot_be_reaped_is_left_behind(start: Start, tmp_path: Path) -> None:
    """A process that another one traces, and does not wait for, stays after SIGKILL, as one in a hung system call."""
    pool = start("""
        import ctypes, os, time
        from pathlib import Path
        here = Path(__file__).parent
        def reward(completion):
            if completion != "traced": return 1
            ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # any process may trace this one
            (here / "made").write_text(str(os.getpid()))
            (here / "made").rename(here / "worker")
            time.sleep(600)
        """, timeout_seconds=3, workers=2)  # fmt: skip
    script = [sys.executable, "-c", TRACER, str(tmp_path / "worker"), str(tmp_path / "seized")]
    with subprocess.Popen(script) as tracer:
        try:
            begun = time.monotonic()
            found = pool.score(samples("traced", "a", "b"))
            again = pool.score(samples("a"))
            took = time.monotonic() - begun
            said = (tmp_path / "seized").read_text()
            if said != "yes":
                pytest.skip(f"no process may trace another here: {said}")
            worker = int((tmp_path / "worker").read_text())
            assert Path(f"/proc/{worker}").exists(), "the case is none: it could be reaped"
        finally:
            tracer.kill()

    assert took < 12
    assert [(each.reward, each.fault) for each in found] == [(None, "timeout"), (1.0, None), (1.0, None)]
    assert again[0].reward == 1.0
    assert wait_for(lambda: not Path(f"/proc/{worker}").exists()), "it is reaped when it goes"


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_supervisor_that_is_stopped_ends_the_run_with_a_sentence(tmp_path: Path, size: int) -> None:
    """A long request does not even fit into the pipe."""
    (tmp_path / "my.py").write_text("import os\ndef reward(completion): os.kill(os.getppid(), 19); return 1\n")
    config = RewardPoolConfig(workers=1, timeout_seconds=600)
    with RewardPool([user()], config, tmp_path, tmp_path, silent_seconds=1.5) as pool:
        supervisor = pool._process.pid if pool._process is not None else 0
        if size > 1:
            os.kill(supervisor, 19)
        begun = time.monotonic()

        with pytest.raises(RunStopped, match=r"The reward processes have said nothing for 1\.5 s"):
            pool.score(samples("a" * size))

        assert time.monotonic() - begun < 10
        assert not is_alive(supervisor)


@pytest.mark.slow
def test_a_slow_reward_is_not_taken_for_a_hung_supervisor(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("import time\ndef reward(completion): time.sleep(5); return 1\n")
    with RewardPool([user()], RewardPoolConfig(workers=1), tmp_path, tmp_path, silent_seconds=2.5) as pool:
        assert pool.score([sample()])[0].reward == 1.0


def test_a_reason_is_told_where_nothing_can_be_printed(start: Start) -> None:
    pool = start("""
        import sys
        def reward(completion):
            sys.stderr.close()
            raise ValueError("no such answer")
        """, workers=1)  # fmt: skip

    assert ["raised ValueError: no such answer" in each.message for each in pool.score(samples("a", "b"))] == [True] * 2


def test_a_full_disk_loses_what_is_printed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(
        "import os, sys\n"
        "def reward(completion):\n"
        "    if completion == 'raises': raise ValueError('no such answer')\n"
        "    if completion == 'writes': [os.write(number, b'?' * 64) for number in range(3, 20) if is_socket(number)]\n"
        "    return 1\n"
        "def is_socket(number):\n"
        "    return os.path.exists(f'/proc/self/fd/{number}') and 'socket' in os.readlink(f'/proc/self/fd/{number}')\n"
    )
    pool = RewardPool([user()], RewardPoolConfig(workers=1), tmp_path, tmp_path)
    pool.log_path.symlink_to("/dev/full")

    with pool:
        found = pool.score(samples("a", "raises", "writes", "b"))

    assert [each.reward for each in found] == [1.0, None, None, 1.0]
    assert "raised ValueError: no such answer" in found[1].message
    assert "wrote into the channel of its worker" in found[2].message


TRUE = {**asdict(SampleOutcome(7.0)), "value": 7.0}
LIES = {
    "another's place": {"place": 5, "outcome": TRUE},
    "a negative place": {"place": -1, "outcome": TRUE},
    "a split of one": {"place": 0, "outcome": None},
    "no place": {"outcome": TRUE},
    "a text for a number": {"place": 0, "outcome": {**TRUE, "value": "7"}},
    "a text in its parts": {"place": 0, "outcome": {**TRUE, "parts": {"a": "7"}}},
    "an unknown fault": {"place": 0, "outcome": {**TRUE, "fault": "bogus"}},
    "an unknown field": {"place": 0, "outcome": {**TRUE, "bogus": 1}},
    "no outcome": {"place": 0, "outcome": 7},
    "no mapping": [0, TRUE],
}


@pytest.mark.parametrize("form", ["def reward(completion): return act([completion])[0]",
                                  "def reward(completions): return act(completions)",
                                  "async def reward(completion): return act([completion])[0]"])  # fmt: skip
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_in_the_channel_costs_its_sample_alone(start: Start, lie: str, form: str) -> None:
    payload = json.dumps(LIES[lie]).encode()
    pool = start(f"""
        import gc, os
        def act(completions):
            if "lies" in completions:
                payload = number() + b" " + {payload!r}
                os.write(channel(), len(payload).to_bytes(8, "little") + payload)
            return [len(each) for each in completions]
        def channel():
            links = {{n: f"/proc/self/fd/{{n}}" for n in range(3, 20) if os.path.exists(f"/proc/self/fd/{{n}}")}}
            return max(n for n, link in links.items() if "socket" in os.readlink(link))  # lower ones: an event loop's
        def number():
            return b"%d" % next(o for o in gc.get_objects() if type(o).__name__ == "_Channel")._number
        {form}
        """, workers=1, batch_size=1)  # fmt: skip

    found = pool.score(samples("a", "lies", "cc"))
    again = pool.score(samples("a", "bb"))

    assert [each.reward for each in found] == [1.0, None, 2.0]
    assert "wrote into the channel of its worker" in found[1].message
    assert [each.reward for each in again] == [1.0, 2.0]


def test_an_outcome_of_no_request_moves_no_reward_to_another_sample(start: Start) -> None:
    pool = start("""
        import json, os, time
        def reward(completion):
            if completion == "lies":
                payload = json.dumps({"place": 0, "outcome": TRUE}).encode()
                os.write(channel(), len(payload).to_bytes(8, "little") + payload)
            time.sleep(0.5 if completion == "lies" else 0.1)
            return 0.25 if completion == "lies" else 1.0
        def channel():
            links = {n: f"/proc/self/fd/{n}" for n in range(3, 20) if os.path.exists(f"/proc/self/fd/{n}")}
            return next(n for n, link in links.items() if "socket" in os.readlink(link))
        TRUE = """ + repr(TRUE), workers=1)  # fmt: skip

    for _ in range(2):
        assert [each.reward for each in pool.score(samples("lies", "a", "b", "c"))] == [None, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("field", ["value", "parts", "metrics"])
def test_a_number_without_bounds_in_the_channel_costs_its_sample_alone(start: Start, field: str) -> None:
    pool = start(f"""
        import gc, json, os
        def reward(completion):
            if completion == "lies":
                number = next(o for o in gc.get_objects() if type(o).__name__ == "_Channel")._number
                outcome = TRUE | {{"{field}": 10**400 if "{field}" == "value" else {{"a": 10**400}}}}
                payload = b"%d " % number + json.dumps({{"place": 0, "outcome": outcome}}).encode()
                os.write(channel(), len(payload).to_bytes(8, "little") + payload)
            return len(completion)
        def channel():
            links = {{n: f"/proc/self/fd/{{n}}" for n in range(3, 20) if os.path.exists(f"/proc/self/fd/{{n}}")}}
            return next(n for n, link in links.items() if "socket" in os.readlink(link))
        TRUE = """ + repr(TRUE), workers=1, batch_size=1)  # fmt: skip

    assert [each.reward for each in pool.score(samples("a", "lies", "cc"))] == [1.0, None, 2.0]


def test_an_outcome_that_is_told_twice_costs_one_sample_of_its_task(start: Start) -> None:
    pool = start("""
        import gc, json, os
        def reward(completion, sample_id):
            if completion == "lies":
                number = next(o for o in gc.get_objects() if type(o).__name__ == "_Channel")._number
                payload = b"%d " % number + json.dumps({"place": 0, "outcome": TRUE}).encode()
                for _ in range(40): os.write(channel(), len(payload).to_bytes(8, "little") + payload)
            return len(completion)
        def channel():
            links = {n: f"/proc/self/fd/{n}" for n in range(3, 20) if os.path.exists(f"/proc/self/fd/{n}")}
            return next(n for n, link in links.items() if "socket" in os.readlink(link))
        TRUE = """ + repr(TRUE), workers=1)  # fmt: skip

    found = pool.score(samples(*"abcdefgh", "lies", "ii", "jj", "k", "l", "m", "n", "o"))

    assert [each.reward for each in found if each.message == ""] == [*[1.0] * 8, 7.0, 2.0, *[1.0] * 5]
    assert [each.message[:52] for each in found if each.message] == [
        "reward reward wrote into the channel of its worker; "
    ]
    assert pool.score(samples("a"))[0].reward == 1.0
