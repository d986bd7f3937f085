"""The code reward: right and wrong code, code that ends early, never ends, or takes all memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.reward import CodeConfig
from tests.rewards.conftest import Start, is_alive, sample

TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
RIGHT = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.mark.parametrize(
    ("completion", "passed"),
    [
        (RIGHT, 1.0),
        (fenced("def add(a, b): return 3"), 0.5),
        (fenced("def add(a, b): return a - b"), 0.0),
        (fenced("def add(a, b) return a + b"), 0.0),
        ("def add(a, b): return a + b", 0.0),
        (fenced("def add(a, b): return 0") + RIGHT, 1.0),
        (RIGHT.replace("python", ""), 1.0),
        (fenced("import os\nos._exit(0)"), 0.0),
        (fenced("raise SystemExit(0)"), 0.0),
        (fenced("print('2\\n' * 1000)\nimport os\nos.write(1, b'2'); os._exit(0)"), 0.0),
        (fenced("x = bytearray(1 << 31)\ndef add(a, b): return a + b"), 0.0),
        (fenced("open('big', 'wb').write(bytes(1 << 25))\ndef add(a, b): return a + b"), 0.0),
        (fenced("import os\nassert not set(os.environ) - {'LC_CTYPE'}\ndef add(a, b): return a + b"), 1.0),
    ],
    ids=range(13),
)
@pytest.mark.cases(6)
def test_code_passes_or_fails_its_tests(start: Start, completion: str, passed: float) -> None:
    pool = start("", CodeConfig(memory_mib=512), CodeConfig(name="share", grade="share", memory_mib=512))

    parts = pool.score([sample(completion, 0, tests=TESTS)])[0].parts

    assert parts == {"code": float(passed == 1.0), "code/passed": passed, "share": passed, "share/passed": passed}


def test_tests_may_be_one_text(start: Start) -> None:
    assert start("", CodeConfig()).score([sample(RIGHT, 0, tests="\n".join(TESTS))])[0].reward == 1.0


def test_an_infinite_loop_earns_nothing_and_ends_with_what_it_started(start: Start, tmp_path: Path) -> None:
    code = f"""
import subprocess
from pathlib import Path
child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
Path({str(tmp_path)!r}, "pid").write_text(str(child.pid))
while True: pass
"""
    pool = start("", CodeConfig(timeout_seconds=1.0), timeout_seconds=0.1)

    found = pool.score([sample(fenced(code), 0, tests=TESTS)])[0]

    assert (found.reward, found.fault) == (0.0, None)
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_what_code_leaves_running_ends_with_it(start: Start, tmp_path: Path) -> None:
    note = f"Path({str(tmp_path)!r}, 'pid')"
    first = f"""
import subprocess
from pathlib import Path
{note}.write_text(str(subprocess.Popen(["/bin/sleep", "600"]).pid))
"""
    second = f"""
from pathlib import Path
stat = Path("/proc", {note}.read_text(), "stat")
assert not stat.exists() or stat.read_text().split()[2] == "Z"
"""
    pool = start("", CodeConfig(), workers=1)

    found = pool.score([sample(fenced(code), place, tests="pass") for place, code in enumerate((first, second))])

    assert [each.reward for each in found] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("row", "said"), [({"tests": []}, "column tests holds no test"), ({}, "the row has no column tests")]
)
def test_a_row_without_tests_is_an_error(start: Start, row: dict[str, Any], said: str) -> None:
    found = start("", CodeConfig()).score([sample(RIGHT, 0, **row)])[0]

    assert found.fault == "error"
    assert said in found.message
