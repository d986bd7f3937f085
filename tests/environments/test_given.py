"""Objects of a Python caller are named for the processes of episodes, or refused where those could not import them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import holdfast
from holdfast.environments.forms import Form
from holdfast.environments.given import section_of
from holdfast.errors import ConfigError

SOURCE = """
class World:
    def begin(self, row): ...
    def step(self, turn): ...
    class Inner: ...
def make(): return World()
def add(a: int) -> int: return a
def agent(row, base_url, api_key): ...
WORLDS = {"one": World}
small = lambda: World()
def within():
    def nested(): ...
    return nested
"""


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[ModuleType]:
    (tmp_path / "some_worlds.py").write_text(SOURCE)
    sys.path.insert(0, str(tmp_path))
    yield importlib.import_module("some_worlds")
    sys.path.remove(str(tmp_path))
    del sys.modules["some_worlds"]


def test_objects_at_the_top_of_a_file_are_named(worlds: Any, tmp_path: Path) -> None:
    assert section_of(worlds.World, tmp_path) == {"path": "some_worlds.py:World"}
    assert section_of(worlds.make, tmp_path) == {"path": "some_worlds.py:make"}
    assert section_of([worlds.add], tmp_path) == {"tools": ["some_worlds.py:add"]}
    assert section_of(worlds.agent, tmp_path) == {"kind": "endpoint", "run": "some_worlds.py:agent"}
    assert section_of(worlds.World, tmp_path / "elsewhere") == {"path": f"{tmp_path}/some_worlds.py:World"}
    assert section_of(Form, tmp_path) == {"path": "holdfast.environments.forms:Form"}


def test_a_module_that_a_worker_does_not_find_is_named_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "scripts" / "some_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "world.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.chdir(tmp_path)

    world = importlib.import_module("some_package.world")

    assert section_of(world.World, tmp_path) == {"path": "scripts/some_package/world.py:World"}
    assert section_of(world.World, package.parent) == {"path": "some_package.world:World"}
    monkeypatch.chdir(package.parent)
    assert section_of(world.World, tmp_path) == {"path": "some_package.world:World"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    assert section_of(world.World, tmp_path) == {"path": "some_package.world:World"}


def refused(worlds: Any) -> list[object]:
    main = type("Typed", (), {"__module__": "__main__"})
    lost = type("Lost", (), {"__module__": "no_such_module"})
    return [
        worlds.World(), worlds.WORLDS, worlds.small, worlds.World.Inner, worlds.within(), main, lost,
        functools.partial(worlds.make), [worlds.add, worlds.small], None, 7,
    ]  # fmt: skip


def test_what_no_worker_could_import_is_refused_in_one_paragraph(worlds: Any, tmp_path: Path) -> None:
    for value in refused(worlds):
        with pytest.raises(ConfigError) as raised:
            section_of(value, tmp_path)

        assert str(raised.value).startswith("environment: ")
        assert "\n" not in str(raised.value)
        assert "world.py" in str(raised.value)


def test_a_call_with_such_an_object_writes_nothing(
    worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = {"steps": 1, "model": {"path": "m"}, "data": {"max_length": 64}, "reward": "environment"}

    with pytest.raises(ConfigError, match="environment: World"):
        holdfast.grpo(tree, rows=[{"prompt": "a"}], environment=type("World", (), {}))
    with pytest.raises(ConfigError, match=r"environment.max_turns: 0 "):
        holdfast.grpo(tree | {"environment": {"max_turns": 0}}, rows=[{"prompt": "a"}], environment=worlds.World)

    assert not (tmp_path / "runs").exists()
