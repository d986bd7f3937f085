"""How servers are started on GPUs: command lines, environments, refusals. No GPU has run them; lines are asserted."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.features.vllm.lora import AdapterLimits
from holdfast.features.vllm.placement import gpus_of_servers
from holdfast.features.vllm.processes import Servers, ServerSpec, command_of, environment_of
from holdfast.features.vllm.serving import _spec
from holdfast.launch.environment import visible_names
from tests.features.vllm.served import AHEAD, ServedModel, served_tree, serving
from tests.features.vllm.test_served_runs import run

URLS = ["http://127.0.0.1:8700", "http://127.0.0.1:8701"]


def section_of(**start: Any) -> VLLMEngineConfig:
    return VLLMEngineConfig.model_validate({"url": URLS, "start": start, "python": "python3"})


@pytest.fixture
def eight_gpus(tmp_path: Path) -> dict[str, str]:
    """Give an environment in which nvidia-smi lists eight GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor n in 0 1 2 3 4 5 6 7; do echo "GPU $n: NVIDIA H100 (UUID: GPU-$n)"; done\n')
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def config_of(tmp_path: Path, ranks: int | str = 2, **start: Any) -> GRPOConfig:
    tree = served_tree(URLS, str(tmp_path), launch={"device": "auto", "ranks": ranks})
    tree["rollout"]["engine"]["start"] = start or True
    return from_mapping(tree, GRPOConfig)


def test_the_command_line_of_a_server_on_gpus(tmp_path: Path) -> None:
    section = section_of(
        tensor_parallel_size=2,
        gpu_memory_utilization=0.85,
        max_model_len=4096,
        arguments={
            "enable_prefix_caching": True,
            "async-scheduling": False,
            "max-num-seqs": 256,
            "speculative-config": {"method": "ngram", "num_speculative_tokens": 4},
        },
    )
    served = ServerSpec(
        section, Path("/m"), "policy", "bfloat16", 2048, False, tmp_path, adapters=AdapterLimits(32, 2),
        visible=dict(zip(URLS, ("4,5", "6,7"), strict=True)),
    )  # fmt: skip

    assert shlex.join(command_of(served, URLS[1])) == (
        "python3 -m vllm.entrypoints.openai.api_server --model /m --served-model-name policy --host 127.0.0.1 "
        "--port 8701 --dtype bfloat16 --max-model-len 4096 --load-format dummy --generation-config vllm "
        "--logprobs-mode processed_logprobs --worker-extension-cls holdfast_vllm_extension.Extension "
        """--weight-transfer-config '{"backend": "holdfast"}' --mm-processor-cache-gb 0 """
        """--mm-processor-kwargs '{"backend": "pil"}' --hf-overrides '{"tie_word_embeddings": false}' """
        "--max-loras 2 --max-cpu-loras 3 --max-lora-rank 32 --tensor-parallel-size 2 --gpu-memory-utilization 0.85 "
        """--max-num-seqs 256 --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}' """
        "--enable-scale-out --enable-lora --enable-prefix-caching --no-async-scheduling"
    )
    assert environment_of(served, {"CUDA_VISIBLE_DEVICES": "0,1,2", "RANK": "0"}, URLS[1]) == {
        "CUDA_VISIBLE_DEVICES": "6,7",
        "RANK": "0",
        "PYTHONPATH": str(tmp_path),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }


@pytest.mark.parametrize(
    ("model", "on_cpu", "dtype"),
    [
        ({}, True, "float32"),
        ({"dtype": "bfloat16"}, True, "bfloat16"),
        ({"frozen_dtype": "bfloat16", "lora": {"rank": 2}}, True, "float32"),
        ({}, False, "bfloat16"),
    ],
)
def test_servers_compute_in_the_dtype_of_the_trainer(
    tmp_path: Path, model: dict[str, Any], on_cpu: bool, dtype: str
) -> None:
    optim = {"optim": {"kind": "adamw_bf16"}} if "dtype" in model else {}
    tree = served_tree(URLS, str(tmp_path), model=model, **optim)
    tree["rollout"]["engine"]["start"] = True
    config = from_mapping(tree, GRPOConfig)
    section = config.rollout.engine
    assert isinstance(section, VLLMEngineConfig)

    assert _spec(config, section, tmp_path, on_cpu=on_cpu, visible={}).dtype == dtype


def test_servers_that_share_gpus_can_sleep(tmp_path: Path) -> None:
    served = ServerSpec(section_of(share=True), Path("/m"), "policy", "bfloat16", 64, False, tmp_path)

    assert "--enable-sleep-mode" in command_of(served, URLS[0])


@pytest.mark.parametrize(
    ("start", "placed"),
    [
        ({}, [[2], [3]]),
        ({"tensor_parallel_size": 3}, [[2, 3, 4], [5, 6, 7]]),
        ({"devices": [7, 4]}, [[7], [4]]),
        ({"share": True}, [[0], [1]]),
        ({"share": True, "devices": [1, 2]}, [[1], [2]]),
    ],
)
def test_replicas_are_spread_over_gpus(
    tmp_path: Path, eight_gpus: dict[str, str], start: Any, placed: list[list[int]]
) -> None:
    config = config_of(tmp_path, **start)
    section = config.rollout.engine
    assert isinstance(section, VLLMEngineConfig)

    assert gpus_of_servers(config, section, eight_gpus) == placed


def test_gpus_are_named_as_the_command_sees_them() -> None:
    assert visible_names([0, 2], {"CUDA_VISIBLE_DEVICES": "5,GPU-b,7"}) == "5,7"
    assert visible_names([0, 2], {}) == "0,2"
    assert visible_names([], {}) == ""


@pytest.mark.parametrize(
    ("ranks", "start", "words"),
    [
        (2, {"devices": [1, 4]}, "devices: GPU 1 is a rank's: the 2 ranks have GPUs 0 to 1. Name others, or set"),
        (2, {"devices": [4]}, "devices: 2 servers of 1 GPUs each need 2, and 1 are named. Name one for each."),
        (2, {"devices": [4, 8]}, "devices: there is no GPU 8; this command sees 8, numbered from 0."),
        (7, {}, "2 servers of 1 GPUs each need 2, the ranks take 7, and this command sees 8. Set launch.ranks to"),
        ("auto", {}, "2 servers of 1 GPUs each need 2, the ranks take 8, and this command sees 8. Set launch.ranks"),
        (2, {"tensor_parallel_size": 4}, "2 servers of 4 GPUs each need 8, the ranks take 2, and this command sees 8"),
    ],
)
def test_gpus_that_servers_cannot_have_are_refused(
    tmp_path: Path, eight_gpus: dict[str, str], ranks: Any, start: Any, words: str
) -> None:
    config = config_of(tmp_path, ranks, **start)
    section = config.rollout.engine
    assert isinstance(section, VLLMEngineConfig)

    with pytest.raises(ConfigError) as error:
        gpus_of_servers(config, section, eight_gpus)

    assert words in str(error.value)


def test_gpus_are_refused_on_the_cpu(tmp_path: Path) -> None:
    config = config_of(tmp_path, devices=[0, 1])
    section = config.rollout.engine
    assert isinstance(section, VLLMEngineConfig)

    with pytest.raises(ConfigError, match="this run computes on the CPU, and so do its servers"):
        gpus_of_servers(config, section, {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("engine", "rollout", "words"),
    [
        ({"start": {"devices": [1, 1]}}, {}, "start.devices: a GPU comes twice"),
        ({"start": {"arguments": {"--seed": 1}}}, {}, "write it without its dashes, as in seed"),
        ({"start": {"arguments": {"max_model_len": 9}}}, {}, "this flag follows from the run or has a key of its own"),
        ({"start": {"arguments": {"api-key": "k"}}}, {}, "api-key: this flag follows from the run"),
        ({"start": {"arguments": {"pipeline-parallel-size": 2}}}, {}, "GPUs are counted by tensor_parallel_size"),
        ({"start": {"arguments": {"quantization": "fp8"}}}, {}, "tolerance: quantised weights differ from the trainer"),
        ({"start": {"share": True}}, {"max_staleness": 1}, "sleep while the policy is updated, and max_staleness: 1"),
        ({"start": {"cards": [1]}}, {}, "rollout.engine.start.cards"),
        ({"start": 3}, {}, "rollout.engine.start"),
    ],
)
def test_starts_that_cannot_work_are_told(tmp_path: Path, engine: Any, rollout: Any, words: str) -> None:
    tree = served_tree(URLS, str(tmp_path), **AHEAD)
    tree["rollout"]["engine"] |= engine
    tree["rollout"] |= rollout

    with pytest.raises(ConfigError) as error:
        from_mapping(tree, GRPOConfig)

    assert words in str(error.value)


@pytest.mark.parametrize(("value", "started"), [(True, True), (False, False), (None, False), ({}, True)])
def test_true_stands_for_the_defaults_of_a_start(value: Any, started: bool) -> None:
    section = VLLMEngineConfig.model_validate({"url": URLS, "start": value})

    assert (section.start is not None) is started


def test_flags_that_vllm_does_not_take_are_told_in_its_words(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "sys.exit(print('usage: api_server.py ...\\napi_server.py: error: unrecognized arguments: --bogus 3') or 2)\n"
    )
    program.chmod(0o755)
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{opened.getsockname()[1]}"
    start = {"arguments": {"bogus": 3}}
    section = VLLMEngineConfig.model_validate({"url": url, "start": start, "python": str(program)})
    servers = Servers(ServerSpec(section, tmp_path, "policy", "float32", 64, True, tmp_path))

    with pytest.raises(ConfigError) as error:
        servers.__enter__()

    assert "rollout.engine.start.arguments: the server for" in str(error.value)
    assert "vLLM says: unrecognized arguments: --bogus 3" in str(error.value)


def test_another_version_is_a_warning_with_its_routes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = ServedModel(facts={"version": "0.33.1"})
    with serving(served) as url:
        run(tmp_path, served_tree([url], str(tmp_path), steps=1))

    output = capsys.readouterr().out
    assert output.count(f"warning: the server at {url} is vLLM 0.33.1, and 0.32 is what was run") == 1
    assert "routes that it lists: /inference/v1/generate, " in output
    assert "; that it does not: /reset_prefix_cache" in output


def test_servers_on_the_ranks_gpus_sleep_while_the_policy_is_updated(tmp_path: Path) -> None:
    served = ServedModel()
    with serving(served) as url:
        tree = served_tree([url], str(tmp_path), steps=2)
        tree["rollout"]["engine"]["start"] = {"share": True}
        run(tmp_path, tree)

    events = [what.split()[0] for _, what in served.events if what.split()[0] in {"sleeps", "wakes", "pushed", "asked"}]
    text = json.dumps(events)
    assert events.count("sleeps") >= 3  # after the walk and after each rollout
    assert '"sleeps", "asked"' not in text
    assert '"sleeps", "pushed"' not in text
    assert '"wakes", "pushed"' in text
