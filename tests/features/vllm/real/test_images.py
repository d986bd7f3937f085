"""Images of prompts through a real vLLM: a tiny LLaVA, whose tower is trained and pushed with the rest."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from holdfast.config.load import from_mapping
from holdfast.config.sections.engine import StartConfig, VLLMEngineConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import as_plain
from holdfast.errors import RunStopped
from holdfast.features.vllm.processes import Servers, ServerSpec
from holdfast.metrics.sink import METRICS, read_metrics
from holdfast.parallel.mesh import World
from tests.features.vllm.real import proxy
from tests.features.vllm.real.conftest import PYTHON, free_port, policy_for
from tests.features.vllm.real.test_runs import REWARD
from tests.vision import picture, vision_directory

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
"""Of the text model; vLLM's attention on a CPU takes heads of 32 numbers."""


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a model whose tensors have the names of published checkpoints, which are those that vLLM knows."""
    path = vision_directory(tmp_path_factory.mktemp("llava") / "model", "llava", **SIZES)
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in tensors.items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a file of prompts with none, one or two images of uneven sizes."""
    folder, draw = tmp_path_factory.mktemp("rows"), np.random.default_rng(3)
    lines = []
    for number in range(24):
        names = [str(folder / f"{number}-{index}.png") for index in range((1, 0, 2)[number % 3])]
        for name in names:
            picture(draw, *draw.integers(8, 40, 2)).save(name)
        asked = "<image>" * len(names) + "see " + "".join(draw.choice(list("abcdef"), 4)) + "="
        lines.append(json.dumps({"prompt": asked, "answer": "abc", "images": names}))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "rows.jsonl"


def tree_of(url: str, llava: Path, rows: Path, **sections: Any) -> dict[str, Any]:
    """Return a run of three steps."""
    engine = {"kind": "vllm", "url": [url], "python": PYTHON, "prove": "every_push", **sections.pop("engine", {})}
    return {
        "steps": 3,
        "run": {"name": "r"},
        "model": {"path": str(llava)},
        "data": {"path": str(rows), "batch_size": 4, "max_length": 120, "max_prompt_length": 64},
        "rollout": {"engine": engine, "group_size": 4, "max_new_tokens": 16, "show": 0},
        "reward": "reward.py:even",
        "optim": {"lr": 1e-2},
        "launch": {"ranks": 1, "device": "cpu"},
        **sections,
    }


def finished(tree: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """Return `holdfast grpo` of a tree, ended."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "run.yaml").write_text(json.dumps(tree))
    command = [sys.executable, "-m", "holdfast.cli.main", "grpo", "run.yaml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def test_a_run_on_images_samples_from_the_weights_it_trains(llava: Path, rows: Path, tmp_path: Path) -> None:
    tree = tree_of(f"http://127.0.0.1:{free_port()}", llava, rows, engine={"start": True})

    ended = finished(tree, tmp_path)

    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    metrics = [line for line in read_metrics(next(tmp_path.glob(f"**/r/{METRICS}"))) if "loss" in line]
    differences = [line["sampling/sampling_logp_difference/max"] for line in metrics]
    print(f"log-probabilities of sampled tokens differ from the trainer's by {differences}")
    assert len(metrics) == 3
    assert max(differences) < 1e-3
    assert all(line["grad_norm"] > 1e-3 for line in metrics)


def test_a_server_that_resizes_otherwise_is_refused_before_step_1(llava: Path, rows: Path, tmp_path: Path) -> None:
    start = {"arguments": {"mm-processor-kwargs": {"backend": "torchvision"}}}
    tree = tree_of(f"http://127.0.0.1:{free_port()}", llava, rows, engine={"start": start})

    ended = finished(tree, tmp_path)

    print(ended.stdout[-1000:])
    assert ended.returncode != 0
    assert "say other log-probabilities than the trainer" in ended.stdout + ended.stderr
    assert not list(tmp_path.glob("**/checkpoints/step-*"))


@pytest.fixture(scope="module")
def server(llava: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the address of a server for the model."""
    url, folder = f"http://127.0.0.1:{free_port()}", tmp_path_factory.mktemp("server")
    config = from_mapping(tree_of(url, llava, rows), GRPOConfig)
    (folder / "config.json").write_text(json.dumps(as_plain(config)))
    module = "holdfast.features.vllm.server_files"
    command = [sys.executable, "-m", module, "grpo", folder / "config.json", folder, folder / "model"]
    subprocess.run(command, check=True)
    section = VLLMEngineConfig(url=[url], start=StartConfig(), python=PYTHON)
    with Servers(ServerSpec(section, folder / "model", "policy", "float32", 120, True, folder)):
        yield url


def inverted(path: str, body: bytes) -> tuple[str, bytes]:
    """Send another image than was asked about, of the same size."""
    asked = json.loads(body) if path.startswith("/inference") else {}
    for image in asked.get("content_parts", ()):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image["url"].partition(",")[2]))))
        file = io.BytesIO()
        Image.fromarray(255 - pixels).save(file, "PNG")
        image["url"] = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return path, json.dumps(asked).encode() if asked else body


def test_pushes_are_proved_with_an_image_and_a_wrong_one_is_noticed(
    server: str, llava: Path, rows: Path, world: World
) -> None:
    spoiler = proxy.Spoiler()
    with proxy.between(server, spoiler) as url:
        policy = policy_for(tree_of(url, llava, rows), world)
        try:
            policy.publish()
            (first,) = policy.engine.proofs
            policy.move(0.05)  # the tower with the rest; features of the same image that were kept would be old ones
            policy.publish()
            (second,) = policy.engine.proofs
            print(f"proofs with an image: log-probabilities differ by {first.difference:.1e}, {second.difference:.1e}")
            assert max(first.difference, second.difference) < 1e-4
            assert second.from_before > 1e-3

            spoiler.request = inverted
            policy.move(0.01, seed=1)
            with pytest.raises(RunStopped, match="say other log-probabilities than the trainer"):
                policy.publish()
        finally:
            policy.engine.close()
