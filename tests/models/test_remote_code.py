"""Python code that comes with a model runs only where it was asked for by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from holdfast.checkpoint.export.about import ABOUT_FILE, Exported, check_weights, read_about
from holdfast.checkpoint.export.card import Papers
from holdfast.checkpoint.export.write import export
from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ModelError
from holdfast.models.setup.model import blueprint
from holdfast.parallel.collectives import RankGroup
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
from .louder_house import louder

class HouseForCausalLM(LlamaForCausalLM):
    config_class = HouseConfig

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits = louder(output.logits)
        return output
"""
HELPER = """
def louder(logits):
    return logits + 1.0
"""
ELSEWHERE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("taken", trust_remote_code=True)
AutoTokenizer.from_pretrained("taken", trust_remote_code=True)
with torch.no_grad():
    print(json.dumps(model(input_ids=torch.arange(2, 12)[None]).logits[0].tolist()))
print(sys.modules[type(model).__module__].__file__, file=sys.stderr)
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
    (directory / "louder_house.py").write_text(HELPER)
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


@pytest.mark.slow
def test_an_export_brings_the_code_and_loads_in_another_process_from_another_directory(
    house: Path, tmp_path: Path
) -> None:
    """Longer than three seconds: a fresh process imports transformers and nothing of ours."""
    policy, origin = filled(house, trust_remote_code=True, attention="sdpa")
    papers = Papers(Exported(run_id="", run="house", step=1))
    export(policy, origin, tmp_path / "export", RankGroup(), papers=papers)
    policy.language_model.eval()
    with torch.no_grad():
        ours = policy.language_model(input_ids=torch.arange(2, 12)[None]).logits[0]
    shutil.rmtree(house)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "export").rename(elsewhere / "taken")

    loaded = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        cwd=elsewhere,
        env={
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=True,
    )

    assert torch.equal(torch.tensor(json.loads(loaded.stdout)), ours)
    assert str(tmp_path / "home") in loaded.stderr
    files = json.loads((elsewhere / "taken" / ABOUT_FILE).read_text())["files"]
    code = {"configuration_house.py", "modeling_house.py", "louder_house.py"}
    assert set(files) == {"model.safetensors", *code}
    exported = read_about(elsewhere / "taken")
    assert exported is not None
    for name in code:
        text = (elsewhere / "taken" / name).read_bytes()
        assert files[name] == {"size": len(text), "xxh3_128": xxhash.xxh3_128_hexdigest(text)}
    check_weights(elsewhere / "taken", exported, by_hash=True)
    (elsewhere / "taken" / "louder_house.py").write_text(HELPER.replace("1.0", "2.0"))
    with pytest.raises(ModelError, match=r"louder_house.py has other bytes"):
        check_weights(elsewhere / "taken", exported, by_hash=True)


def test_an_export_whose_code_is_not_all_there_is_refused_by_the_name_of_the_file(house: Path, tmp_path: Path) -> None:
    config = json.loads((house / "config.json").read_text())
    config["auto_map"]["AutoModelForSequenceClassification"] = "scoring_house.HouseForSequenceClassification"
    (house / "config.json").write_text(json.dumps(config))
    policy, origin = filled(house, trust_remote_code=True)

    with pytest.raises(ModelError, match=r"AutoModelForSequenceClassification, and scoring_house.py lies neither in "):
        export(policy, origin, tmp_path / "export", RankGroup())

    assert not (tmp_path / "export").exists()


def test_a_known_architecture_is_built_from_transformers_own_code_without_trust(tmp_path: Path) -> None:
    write_directory(tmp_path, "llama")

    origin = blueprint(ModelConfig(path=str(tmp_path)), Path.cwd(), seed=0)

    assert type(origin.model).__module__ == "transformers.models.llama.modeling_llama"
    assert origin.notes == ()
