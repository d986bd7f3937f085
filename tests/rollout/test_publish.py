"""Buckets of weights: what goes together, what is hashed, who may push."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash

from holdfast.config.load import from_mapping
from holdfast.config.sections.engine import LocalEngineConfig, VLLMEngineConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.launch.servers import Served, command_of, environment_of
from holdfast.rollout.publish import Publisher, digest
from holdfast.rollout.servers import VLLMServer

URL = "http://127.0.0.1:8700"


def tree(engine: object) -> dict[str, object]:
    """Return a run with an engine."""
    return {
        "model": {"path": "m"},
        "data": {"path": "rows", "max_length": 256},
        "reward": "exact",
        "steps": 1,
        "rollout": {"engine": engine},
    }


def test_a_hash_is_of_the_bytes_of_a_tensor() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)

    assert digest(tensor.t()) == xxhash.xxh3_128_hexdigest(tensor.t().contiguous().view(torch.uint8).numpy().tobytes())
    assert digest(tensor) != digest(tensor.t())


def test_a_server_is_one_process_s_at_a_time_and_free_when_that_was_killed(tmp_path: Path) -> None:
    server = VLLMServer.of(URL, VLLMEngineConfig(url=[URL]))
    script = (
        "import sys, time; from pathlib import Path; from holdfast.rollout.publish import Publisher;"
        "from holdfast.rollout.servers import VLLMServer; from holdfast.config.sections.engine import VLLMEngineConfig;"
        f"Publisher(Path(sys.argv[1]), 1).lease(VLLMServer.of('{URL}', VLLMEngineConfig(url=['{URL}'])), 'x');"
        "print('has it', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "has it\n"

    with pytest.raises(ConfigError, match=rf"another run pushes weights to {URL} \(process {other.pid}\)"):
        Publisher(tmp_path, 1).lease(server, "x")
    other.kill()
    other.wait()
    other.stdout.close()
    publisher = Publisher(tmp_path, 1)
    publisher.lease(server, "x")
    publisher.close()


def test_a_word_is_an_engine_and_a_section_is_one_too() -> None:
    assert from_mapping(tree("inprocess"), GRPOConfig).rollout.engine == LocalEngineConfig(kind="inprocess")
    assert from_mapping(tree({"kind": "vllm", "url": URL}), GRPOConfig).rollout.engine == VLLMEngineConfig(url=[URL])


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"url": "127.0.0.1"}, "is no address"),
        ({"url": f"{URL}/v1"}, "leave /v1 out"),
        ({"url": [URL, f"{URL}/"]}, "an address comes twice"),
        ({"url": "http://10.0.0.7:8700", "start": True}, "and 10.0.0.7 is another address"),
        ({"url": "http://127.0.0.1", "start": True}, "name the port"),
        ({"url": URL, "api_key_variable": "sk-123"}, "never a key"),
        ({"url": URL, "prove": 0}, "prove"),
        ({"url": []}, "url"),
    ],
)
def test_a_section_that_cannot_work_is_told(section: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_mapping(tree({"kind": "vllm", **section}), GRPOConfig)


def test_no_secret_stands_on_a_command_line(tmp_path: Path) -> None:
    section = VLLMEngineConfig(url=[URL], start=True, api_key_variable="SERVER_KEY")
    served = Served(section, tmp_path, "policy", "float32", 256, True, tmp_path)

    command = command_of(served, URL)
    environment = environment_of(served, {"SERVER_KEY": "s3cret", "PYTHONPATH": "/ours"})

    assert "s3cret" not in " ".join(command)
    assert environment["VLLM_API_KEY"] == "s3cret"
    assert environment["PYTHONPATH"] == str(tmp_path)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "--no-enable-chunked-prefill" in command
