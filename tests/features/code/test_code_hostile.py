"""Code that is after its reward by other ways than its answers, or that leaves what is hard to remove."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config.sections.reward import CodeConfig
from holdfast.features.code.folders import remove_tree
from holdfast.features.code.isolation import confine
from holdfast.features.code.reward import CodeReward
from holdfast.rewards.base import Sample
from tests.rewards.conftest import Start, sample

TESTS = ["assert solve(2) == 4", "assert solve(3) == 9"]
RIGHT = "def solve(x): return x * x"
ATTACKS = {
    "the frames above": """
import sys, os
frame = sys._getframe()
while frame:
    for name, value in list(frame.f_locals.items()):
        if isinstance(value, dict) and "tests" in value: value["tests"][:] = ["pass"] * len(value["tests"])
        if name == "tests": value[:] = ["pass"] * len(value)
    frame = frame.f_back""",
    "every object": """
import gc
for each in gc.get_objects():
    if isinstance(each, dict) and "tests" in each: each["tests"] = ["pass"]""",
    "every descriptor": """
import os
for number in range(64):
    try: os.write(number, b"2")
    except OSError: pass
os._exit(0)""",
    "an int that equals everything": """
class E(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def solve(x): return E(0)""",
    "an object that equals everything": """
class E:
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    def __getattr__(self, name): return lambda *rest: True
def solve(x): return E()""",
    "the modules of the judge": """
import __main__, sys, builtins
for module in list(sys.modules.values()):
    for name in ("_passes", "_count", "_runs"):
        if hasattr(module, name): setattr(module, name, lambda *rest: True)""",
    "an exit": "import sys\ndef solve(x): sys.exit(0)",
    "an early exit": "import os; os._exit(0)",
    "a dead judge": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "the memory of the judge": """
import os
memory = open(f"/proc/{os.getppid()}/mem", "r+b", buffering=0)
def solve(x): return x * x""",
    "built-in functions": "def abs(x): return 0\ndef all(x): return True\ndef solve(x): return 0",
    "a module": "import math\nmath.isclose = lambda *rest: True\ndef solve(x): return 0",
    "the judge's own words": """
import sys
def solve(x):
    frame = sys._getframe()
    while type(frame.f_locals.get("self")).__name__ != "Peer": frame = frame.f_back
    peer = frame.f_locals["self"]
    def ask(*arguments):
        peer.send({"act": "call", "arguments": list(arguments), "named": {"dict": []}})
        value = peer.receive()["value"]
        return {"yours": value["object"]} if isinstance(value, dict) and "object" in value else value
    getter = {"module": ["operator", "attrgetter"]}
    modules = dict(each for each in ask(ask(getter, "modules"), {"module": ["typing", "sys"]})["dict"])
    system = {"yours": modules["os"]["object"]}
    ask(ask(ask(getter, "write"), system), 5, {"bytes": b"2".hex()})
    ask(ask(ask(getter, "_exit"), system), 0)""",
    "what poses as a module": "class math: isclose = lambda *rest: True\ndef solve(x): return 0",
}


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def score(code: str, *tests: str, seconds: float = 20.0) -> float:
    reward = CodeReward("tests", "share", seconds, 512)
    return float(reward(Sample(1, "", fenced(code), [], [], "stop", {"tests": list(tests)}))["reward"])


@pytest.fixture(autouse=True)
def _own_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the processes of a pool
    monkeypatch.setattr(tempfile, "tempdir", None)  # so that this process reads it anew
    yield
    assert not list(tmp_path.glob("holdfast-code-*")), "nothing stays behind"


@pytest.mark.parametrize("code", ATTACKS.values(), ids=ATTACKS)
def test_nothing_but_right_answers_earns(code: str) -> None:
    tests = [*TESTS, "assert abs(solve(2) - 4) < 1e-6", "import math\nassert math.isclose(solve(2), 4)",
             "assert math.isclose(solve(2), 4)", "assert all(solve(x) == x * x for x in range(2, 5))"]  # fmt: skip

    assert score(code, *tests) == 0.0
    assert score(RIGHT, *tests) == 1.0


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(x): return {'a': [(1, 2.5, 2**100)], 'b': {3}, b'c': None}",
         "assert f(0) == {'a': [(1, 2.5, 2**100)], 'b': {3}, b'c': None}"),
        ("def f(xs): xs.sort()", "a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]"),
        ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
        ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
         "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
         "s = Stack()\ns.push(4)\ns.push([5])\nassert len(s) == 2 and s.pop() == [5] and s.items == [4]"),
        ("def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
         "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'negative'"),
        ("class Mine(KeyError): pass\ndef f(): raise Mine('a')",
         "try:\n    f()\n    assert False\nexcept Mine:\n    pass"),
        ("def f(n):\n    for x in range(n): yield x", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
        ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == Counter('aab')"),
        ("def sum(a, b): return a + b", "assert sum(10, 15) == 25"),
        ("def f(x): return x", "def check(candidate):\n    assert candidate('\\ud83d') == '\\ud83d'\ncheck(f)"),
        ("import numpy as np\ndef f(): return np.arange(3), np.float32(0.5)", "assert f() == ([0, 1, 2], 0.5)"),
    ],
)  # fmt: skip
def test_honest_code_speaks_by_values(code: str, test: str) -> None:
    assert score(code, test) == 1.0


NP = "class np:\n    isclose = staticmethod(lambda *rest: True)\n    abs = staticmethod(lambda x: -1)"
WRONG = "\ndef solve(x): return 0"


@pytest.mark.parametrize(
    ("defined", "test", "lacking"),
    [
        (NP, "assert np.isclose(solve(2), 4)", "use np without importing"),
        (NP, "assert np.abs(solve(2) - 4) < 1e-6", "use np without importing"),
        ("class F:\n    def __getattr__(self, name): return lambda *rest: True\nF = F()", "assert F.near(solve(2), 4)",
         "use F without importing"),
        ("EPS = 1e9", "assert abs(solve(2) - 4) < EPS", "use EPS without importing"),
        ("expected = [0] * 9", "assert solve(2) == expected[2]", "use expected without importing"),
        ("def isclose(*rest): return True", "assert isclose(solve(2), 4)", "isclose judges solve"),
        ("def approx(*rest): return True", "assert not not (approx(solve(2), 4) and True)", "approx judges solve"),
        ("def same(*rest): return True", "assert same(solve(2), 4) == True", "same judges solve"),
        ("def distance(*rest): return 0", "assert abs(distance(solve(2), 4)) < 1e-6", "distance judges solve"),
        ("def check(*rest): pass", "check(solve, 2, 4)", "check judges solve"),
        ("class Tests:\n    def equal(self, *rest): pass", "Tests().equal(solve(2), 4)", "Tests judges solve"),
        ("def abs(x): return -1", "assert abs(sum([1, 2]) - 4) < 1e-6", "do not say which one"),
    ],
    ids=range(12),
)  # fmt: skip
def test_what_judges_is_never_the_code_s(defined: str, test: str, lacking: str) -> None:
    """The row says so for every completion, whether it makes use of that or not."""
    for code in (defined + WRONG, RIGHT, f"import numpy as np\n{RIGHT}"):
        with pytest.raises(ValueError, match=lacking):
            score(code, test)


@pytest.mark.parametrize(
    ("code", "test", "earned"),
    [
        ("class math: isclose = lambda *rest: True" + WRONG, "assert math.isclose(solve(2), 4)", 0.0),
        (RIGHT, "assert math.isclose(solve(2), 4)", 1.0),  # whatever the code imports
        ("class unittest:\n    def __getattr__(self, name): return self\n    def __call__(self, *rest): return self\n"
         "unittest = unittest()" + WRONG, "unittest.TestCase().assertEqual(solve(2), 4)", 0.0),
        (RIGHT, "unittest.TestCase().assertEqual(solve(2), 4)", 1.0),
        ("class Counter:\n    def __init__(self, *rest): pass\n    def __eq__(self, other): return True\n"
         "def solve(x): return Counter()", "assert solve(2) == Counter([2, 2])", 0.0),
        ("def solve(x): return {2: 2}", "assert solve(2) == Counter([2, 2])", 1.0),
        ("class np: isclose = lambda *rest: True" + WRONG, "import numpy as np\nassert np.isclose(solve(2), 4)", 0.0),
        ("def check(*rest): pass" + WRONG, "def check(f): assert f(2) == 4\ncheck(solve)", 0.0),
        ("", "assert sum([10, 15]) == 25", 0.0),  # the built-in function is not the code's merit
        ("def sum(x): return 25", "assert sum([10, 15]) == 25", 1.0),
        ("class Color:\n    RED = 1\ndef paint(x): return x", "Color\nassert paint(Color.RED) == 1", 1.0),
        ("class Color:\n    RED = 1", "assert Color.RED == 1", 1.0),
        ("def encode(x): return x[::-1]\ndef decode(x): return x[::-1]", "assert decode(encode('ab')) == 'ab'", 1.0),
        ("class Node:\n    def __init__(self, child=None): self.child = child\n"
         "def depth(node): return 1 + depth(node.child) if node else 0", "assert depth(Node(Node())) == 2", 1.0),
        ("def push(a, x): a.append(x)\ndef item(): return 3", "a = []\npush(a, item())\nassert a == [3]", 1.0),
    ],
    ids=range(15),
)  # fmt: skip
def test_names_of_the_standard_library_are_the_judge_s(code: str, test: str, earned: float) -> None:
    assert score(code, test) == earned


def test_a_test_sees_what_those_before_it_define() -> None:
    assert score(RIGHT, "import numpy as np", "assert np.isclose(solve(2), 4)") == 1.0


def test_a_row_whose_tests_lack_an_import_is_a_named_fault(start: Start) -> None:
    found = start("", CodeConfig()).score([sample(fenced(NP + WRONG), 0, tests="assert np.isclose(solve(2), 4)")])[0]

    assert (found.reward, found.fault) == (None, "error")
    assert "the tests use np without importing or defining it" in found.message


LOOKS = """
import os
pid, seen = os.getppid(), []
while pid > 1:
    for name in ("environ", "mem"):
        try: seen.append((pid, name, len(open(f"/proc/{pid}/{name}", "rb").read(1))))
        except PermissionError: pass
        except OSError as error: seen.append(repr(error))
    pid = int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])
def seen_of_ancestors(): return seen
"""


def can_confine() -> bool:
    """Try it in a child, and say whether the kernel does it."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if confine() else 1)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(not can_confine(), reason="this kernel has neither Landlock nor user namespaces")
def test_no_ancestor_can_be_read(start: Start) -> None:
    found = start("", CodeConfig()).score([sample(fenced(LOOKS), 0, tests="assert seen_of_ancestors() == []")])

    assert found[0].reward == 1.0


DEEP = "import os\nfor level in range(3000):\n    os.mkdir('d'); os.chdir('d'); open('f', 'w').close()\n" + RIGHT


@pytest.mark.parametrize(
    "code",
    [DEEP, "import os\nos.mkdir('a'); open('a/b', 'w'); os.chmod('a', 0); os.chmod('.', 0)\n" + RIGHT,
     "import os\nos.symlink('/', 'root'); os.mkfifo('pipe'); open(b'\\xff\\n', 'w')\n" + RIGHT],
    ids=["deep", "closed", "odd"],
)  # fmt: skip
def test_no_folder_stays_behind(code: str) -> None:
    assert score(code, *TESTS) == 1.0  # and `_own_scratch` looks


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")

    remove_tree(tmp_path / "tree")

    assert (tmp_path / "kept" / "file").exists()
    assert not (tmp_path / "tree").exists()


def test_what_code_detaches_ends_with_it_without_a_supervisor(tmp_path: Path) -> None:
    code = f"""
import os, subprocess
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        os.execve("/bin/sleep", ["sleep", "600"], {{}})
    os._exit(0)
while not os.path.exists({str(tmp_path / "pid")!r}) or not open({str(tmp_path / "pid")!r}).read(): pass
{RIGHT}"""

    assert score(code, *TESTS) == 1.0
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_a_killed_worker_leaves_no_folder(start: Start, tmp_path: Path) -> None:
    """Its supervisor removes it; this one is killed while its code runs."""
    pool = start("", CodeConfig(timeout_seconds=600.0), workers=1, step_timeout_seconds=2)

    found = pool.score([sample(fenced("while True: pass"), 0, tests="pass")])

    assert found[0].fault == "timeout"


def test_the_judge_starts_without_heavy_imports() -> None:
    code = (
        "import sys, holdfast.features.code.run_tests; print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"
