"""Models by name, from a real HTTP server on this machine; the libraries read their settings once, hence processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ModelError
from holdfast.models.files.origin import locate
from tests.models.directories import write_directory
from tests.models.hub_server import Hub, serving

PROGRAM = """
import json, sys
from pathlib import Path
from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ModelError
from holdfast.models.setup.model import blueprint
from holdfast.models.files.origin import load_tokenizer, locate

found = {}
for name, case in json.loads(sys.argv[1]).items():
    config = ModelConfig(**case["model"])
    try:
        if case["what"] == "tokenizer":
            found[name] = load_tokenizer(config, Path.cwd())("abc")["input_ids"]
        elif case["what"] == "files":
            directory = locate(config.path, config, Path.cwd(), weights=True)
            found[name] = sorted(path.name for path in directory.iterdir())
        else:
            origin = blueprint(config, Path.cwd(), seed=0)
            found[name] = {"rows": origin.model.config.vocab_size, "tensors": len(origin.skeleton.state_dict())}
    except ModelError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def directory_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    base = tmp_path_factory.mktemp("models")
    revisions = {}
    for revision, rows in (("main", 96), ("v2", 128), ("master", 96)):
        write_directory(base / revision, "llama", vocab_size=rows)
        revisions[revision] = directory_files(base / revision) | {
            "pytorch_model.bin": b"pickled",
            "evil.py": b"raise SystemExit",
            "README.md": b"words",
        }
    with serving({"lab/tiny": revisions, "lab/words": revisions}) as hub:
        yield hub


def case(what: str, **model: Any) -> dict[str, Any]:
    return {"what": what, "model": model}


def run(cases: dict[str, Any], home: Path, **environment: str) -> dict[str, Any]:
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    settings = {"HF_HOME": str(home), "MODELSCOPE_CACHE": str(home / "ms"), "MODELSCOPE_HOME": str(home / "mshome")}
    settings |= {"HF_HUB_DOWNLOAD_TIMEOUT": "5", "HF_HUB_ETAG_TIMEOUT": "5", "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases)],
        env=inherited | settings | environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def found(hub: Hub, home: Path) -> dict[str, Any]:
    """Return what every case gave, starting with an empty cache."""
    cases = {
        "tokenizer alone": case("tokenizer", path="other/model", tokenizer="lab/words"),
        "tokenizer beside a revision": case("tokenizer", path="lab/tiny", revision="v2", tokenizer="lab/words"),
        "model": case("blueprint", path="lab/tiny"),
        "revision": case("blueprint", path="lab/tiny", revision="v2"),
        "files": case("files", path="lab/tiny"),
        "files with code": case("files", path="lab/tiny", trust_remote_code=True, revision="v2"),
        "missing": case("blueprint", path="lab/nothing"),
        "missing revision": case("blueprint", path="lab/tiny", revision="v9"),
    }
    return run(cases, home, HF_ENDPOINT=hub.address)


@pytest.mark.slow
def test_a_model_is_downloaded_by_name(found: dict[str, Any]) -> None:
    assert found["model"] == {"rows": 96, "tensors": 21}


def test_a_revision_is_downloaded_by_name(found: dict[str, Any]) -> None:
    assert found["revision"] == {"rows": 128, "tensors": 21}


def test_weights_and_texts_come_without_pickles_and_code(found: dict[str, Any]) -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(found["files"])
    assert not {"pytorch_model.bin", "evil.py", "README.md"} & set(found["files"])


def test_code_comes_only_where_it_is_trusted(found: dict[str, Any]) -> None:
    assert set(found["files with code"]) == set(found["files"]) | {"evil.py"}


def test_a_tokenizer_is_downloaded_without_the_weights(hub: Hub, found: dict[str, Any]) -> None:
    assert len(found["tokenizer alone"]) == 3
    assert "lab/words/tokenizer.json" in hub.fetched
    assert "lab/words/model.safetensors" not in hub.fetched


def test_a_revision_is_the_model_s_and_no_other_repository_s(found: dict[str, Any]) -> None:
    assert found["tokenizer beside a revision"] == found["tokenizer alone"]


@pytest.mark.slow
def test_what_was_downloaded_once_is_not_downloaded_again(hub: Hub, home: Path, found: dict[str, Any]) -> None:
    assert hub.fetched.count("lab/tiny/model.safetensors") == 2  # two revisions

    offline = run({"it": case("blueprint", path="lab/tiny")}, home, HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="1")

    assert offline["it"] == found["model"]


def test_a_missing_name_and_a_missing_revision_are_one_paragraph_each(found: dict[str, Any]) -> None:
    for name, words in (("missing", "lab/nothing is no"), ("missing revision", "lab/tiny is no directory here")):
        assert found[name].startswith(words)
        assert "the Hugging Face hub did not give it" in found[name]
        assert "Check the spelling, the network and your access token." in found[name]
        assert "\n" not in found[name]
    assert "at revision v9" in found["missing revision"]


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_one_paragraph(tmp_path: Path) -> None:
    found = run({"it": case("blueprint", path="lab/tiny")}, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")

    assert found["it"].startswith("lab/tiny is no directory here, and the Hugging Face hub did not give it")
    assert "\n" not in found["it"]


@pytest.mark.parametrize("name", ["./lab/tiny", "/lab/tiny", "~/lab/tiny", "a/b/c", "../tiny"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=rf"There is no directory {name}"):
        locate(name, ModelConfig(path=name), tmp_path, weights=True)


def test_a_relative_directory_is_looked_up_beside_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "lab" / "tiny").mkdir(parents=True)

    found = locate("lab/tiny", ModelConfig(path="lab/tiny"), tmp_path, weights=True)

    assert found == tmp_path / "lab" / "tiny"


@pytest.mark.skipif(importlib.util.find_spec("modelscope") is not None, reason="modelscope is installed")
def test_without_its_package_modelscope_is_refused_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"pip install 'holdfast\[modelscope\]'"):
        locate("lab/tiny", ModelConfig(path="lab/tiny", hub="modelscope"), tmp_path, weights=True)


@pytest.mark.skipif(importlib.util.find_spec("modelscope") is None, reason="needs modelscope")
def test_modelscope_gives_models_by_name_and_revision(hub: Hub, tmp_path: Path) -> None:
    cases = {
        "model": case("blueprint", path="lab/tiny", hub="modelscope"),
        "revision": case("blueprint", path="lab/tiny", hub="modelscope", revision="v2"),
        "files": case("files", path="lab/tiny", hub="modelscope"),
        "missing": case("blueprint", path="lab/nothing", hub="modelscope"),
    }

    found = run(cases, tmp_path, MODELSCOPE_ENDPOINT=hub.address)

    assert found["model"] == {"rows": 96, "tensors": 21}
    assert found["revision"] == {"rows": 128, "tensors": 21}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(found["files"])
    assert not {"pytorch_model.bin", "evil.py", "README.md"} & set(found["files"])
    assert found["missing"].startswith("lab/nothing is no directory here, and ModelScope did not give it")
    assert "\n" not in found["missing"]
