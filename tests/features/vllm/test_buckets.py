"""Buckets of weights: what goes together, what is hashed, who may push."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from holdfast import patience
from holdfast.config.load import from_mapping
from holdfast.config.sections.engine import LocalEngineConfig, VLLMEngineConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.features.vllm.buckets import Leases, digest
from holdfast.features.vllm.processes import ServerSpec, command_of, environment_of
from holdfast.features.vllm.servers import VLLMServer
from tests.features.vllm.served import ServedModel, serving

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


def test_a_server_is_one_process_s_at_a_time_and_free_when_that_was_killed() -> None:
    script = (
        "import sys, time; from holdfast.features.vllm.buckets import Leases;"
        "from holdfast.features.vllm.servers import VLLMServer;"
        "from holdfast.config.sections.engine import VLLMEngineConfig;"
        "Leases('x').take(VLLMServer.of(sys.argv[1], VLLMEngineConfig(url=[sys.argv[1]])));"
        "print('has it', flush=True); time.sleep(60)"
    )
    with serving(ServedModel()) as url:
        server, leases = VLLMServer.of(url, VLLMEngineConfig(url=[url])), Leases("y")
        other = subprocess.Popen([sys.executable, "-c", script, url], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"

        with pytest.raises(ConfigError, match=rf"another run pushes weights to {url} \(process {other.pid} on "):
            leases.take(server)
        other.kill()
        other.wait()
        other.stdout.close()
        leases.take(server)
        leases.give_back()


def test_a_lease_of_another_machine_is_waited_for_until_it_ends_or_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    served = ServedModel()
    elsewhere = {"token": "z", "host": "elsewhere", "pid": 1, "machine": ["other", "other"]}
    times = replace(patience.current, lease_stale_seconds=0.6, lease_renew_seconds=0.1, lease_look_seconds=0.1)
    monkeypatch.setattr(patience, "current", times)
    with serving(served) as url:
        server, leases = VLLMServer.of(url, VLLMEngineConfig(url=[url])), Leases("y")
        served.lease.ask(elsewhere, 0.5, None, time.monotonic())
        renewal = threading.Timer(0.25, lambda: served.lease.ask(elsewhere, 0.5, None, time.monotonic()))
        renewal.start()
        with pytest.raises(ConfigError, match="another run pushes weights to .*process 1 on elsewhere"):
            leases.take(server)

        leases.take(server)  # nobody renews it any more
        time.sleep(1.0)  # renewed meanwhile

        assert (
            served.lease.ask(elsewhere, 1.0, None, time.monotonic())["holder"]["token"] == "y"
        )  # this one was renewed
        leases.give_back()


def test_a_lease_whose_time_never_runs_out_is_refused_past_a_deadline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = {"token": "z", "host": "else\x1b[2Jwhere" + "x" * 9999, "pid": 1, "machine": ["other", "other"]}
    served = ServedModel(answer=lambda path, told: {"results": [{"holder": holder, "seconds": 0.3}]})
    times = replace(patience.current, lease_stale_seconds=0.3, lease_look_seconds=0.1)
    monkeypatch.setattr(patience, "current", times)
    start = time.monotonic()

    with serving(served) as url, pytest.raises(ConfigError) as error:
        Leases("y").take(VLLMServer.of(url, VLLMEngineConfig(url=[url])))

    assert 0.4 <= time.monotonic() - start < 3.0
    for text in (str(error.value), capsys.readouterr().out):
        assert "process 1 on else\\x1b[2Jwhere" in text
        assert "\x1b" not in text
        assert len(text) < 1000


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
    served = ServerSpec(section, tmp_path, "policy", "float32", 256, True, tmp_path)

    command = command_of(served, URL)
    environment = environment_of(served, {"SERVER_KEY": "s3cret", "PYTHONPATH": "/ours"})

    assert "s3cret" not in " ".join(command)
    assert environment["VLLM_API_KEY"] == "s3cret"
    assert environment["PYTHONPATH"] == str(tmp_path)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "--no-enable-chunked-prefill" in command
