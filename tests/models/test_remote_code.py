"""Python code that comes with a model runs only where it was asked for by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ModelError
from holdfast.models.setup.model import blueprint
from tests.models.directories import filled, write_directory

CONFIGURATION = """
from pathlib import Path
from transformers import LlamaConfig

Path({marker!r}).write_text("ran")

class HouseConfig(LlamaConfig):
    model_type = "house"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_house import HouseConfig

class HouseForCausalLM(LlamaForCausalLM):
    config_class = HouseConfig
"""
TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({marker!r}).write_text("ran")

class HouseTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Path]:
    """Return a model directory with code that leaves `marker` beside it when it runs."""
    from transformers.utils import HF_MODULES_CACHE

    directory = tmp_path / f"house_{tmp_path.name}"
    write_directory(directory, "llama")
    marker = str(tmp_path / "marker")
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "house", "architectures": ["HouseForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_house.HouseConfig",
        "AutoModelForCausalLM": "modeling_house.HouseForCausalLM",
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "configuration_house.py").write_text(CONFIGURATION.format(marker=marker))
    (directory / "modeling_house.py").write_text(MODELING)
    yield directory
    for copied in Path(HF_MODULES_CACHE, "transformers_modules").glob(f"*{tmp_path.name}*"):
        shutil.rmtree(copied)


def test_a_model_with_code_is_refused_by_name_and_nothing_of_it_ran(house: Path) -> None:
    with pytest.raises(
        ModelError, match=rf"{house.name} brings Python code.*AutoConfig, AutoModelForCausalLM.*Read it"
    ):
        filled(house)

    assert not (house.parent / "marker").exists()


def test_a_tokenizer_with_code_is_refused_and_nothing_of_it_ran(house: Path) -> None:
    plain = house.parent / "plain"
    write_directory(plain, "llama")
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "HouseTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_house.HouseTokenizer"]},
    }
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    (plain / "tokenization_house.py").write_text(TOKENIZER.format(marker=str(house.parent / "marker")))

    with pytest.raises(ModelError, match=r"plain.*(trust_remote_code|code)"):
        filled(plain)

    assert not (house.parent / "marker").exists()


def test_code_that_was_asked_for_runs_and_the_run_says_so(house: Path) -> None:
    policy, origin = filled(house, trust_remote_code=True)

    assert (house.parent / "marker").read_text() == "ran"
    assert type(policy.language_model).__name__ == "HouseForCausalLM"
    assert any(f"Python code from {house} runs in this process" in note for note in origin.notes)


def test_a_known_architecture_is_built_from_transformers_own_code_without_trust(tmp_path: Path) -> None:
    write_directory(tmp_path, "llama")

    origin = blueprint(ModelConfig(path=str(tmp_path)), Path.cwd(), seed=0)

    assert type(origin.model).__module__ == "transformers.models.llama.modeling_llama"
    assert origin.notes == ()
