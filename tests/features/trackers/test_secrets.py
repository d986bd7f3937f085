"""What could be secret stays in the run: planted in the environment, in addresses and in paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.public import public_text
from holdfast.features.trackers.environment import tracker_environment
from tests.features.trackers.cases import WrittenRun, skip_without, text_of

SECRETS = [f"planted-{number:02d}-{place}" for place in ("variable", "address", "path") for number in range(10)]
LIBRARIES = ("wandb", "mlflow", "trackio", "swanlab")


def planted() -> dict[str, Any]:
    """Return a configuration with secrets in addresses and paths."""
    sources = [
        {"path": f"https://user:{secret}@host.example:8000/rows.jsonl?token={secret}"} for secret in SECRETS[10:20]
    ]
    rewards = [
        {"kind": "path", "path": f"/home/{secret}/rows.py:f", "kwargs": {"key": secret}} for secret in SECRETS[20:]
    ]
    return {"data": {"sources": sources}, "reward": rewards}


@pytest.mark.parametrize(
    "kind",
    ["csv", "tensorboard", *(pytest.param(kind, marks=pytest.mark.slow) for kind in LIBRARIES)],
)
def test_no_planted_secret_reaches_a_tracker(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "csv":
        skip_without(kind)
    for number, secret in enumerate(SECRETS[:10]):
        monkeypatch.setenv(
            ["OPENAI_API_KEY", "MY_TOKEN", "AWS_PROFILE", "DATABASE_URL"][number % 4] + str(number), secret
        )
    monkeypatch.setenv("HF_TOKEN", SECRETS[0])
    run = WrittenRun(tmp_path / "r", [kind], **planted())
    run.start()
    run.step(1, loss=1.0)
    run.sample(1, ("a prompt", "an answer", 1.0))
    run.end()
    run.catch_up(kind)

    files = text_of(tmp_path / "r" / "trackers") | text_of(tmp_path / "r" / "tensorboard")
    assert files
    assert [(path.name, secret) for path, data in files.items() for secret in SECRETS if secret.encode() in data] == []


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/home/me/rows.jsonl", "rows.jsonl"),
        ("~/secret/model/", "model"),
        ("C:\\Users\\me\\rows.jsonl", "rows.jsonl"),
        ("rows.jsonl?signature=abc", "rows.jsonl"),
        ("https://me:word@host.example:8000/v1?token=abc", "https://host.example:8000"),
        ("https://hooks.example/services/T0/B0/abc", "https://hooks.example"),
        ("s3://bucket/private/rows.jsonl", "s3://bucket"),
        ("http://[broken", "(text of 14 characters)"),
        ("ask https://me:word@host.example", "(text of 32 characters)"),
        ("You are a bank.\nThe code is 1234.", "(text of 33 characters)"),
        ("my_reward.py:short", "my_reward.py:short"),
        ("half \ud83d", "half \\ud83d"),
    ],
)
def test_text_is_reduced_to_what_names_something(text: str, public: str) -> None:
    assert public_text(text) == public


def test_a_library_sees_its_own_credentials_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, name.lower())

    seen = {kind: set(tracker_environment(kind, Path("x")).values()) for kind in (*LIBRARIES, "csv", "tensorboard")}

    everything = {"wandb_api_key", "swanlab_api_key", "mlflow_tracking_password", "hf_token", "openai_api_key"}
    assert {kind: values & everything for kind, values in seen.items()} == {
        "wandb": {"wandb_api_key"},
        "swanlab": {"swanlab_api_key"},
        "mlflow": {"mlflow_tracking_password"},
        "trackio": set(),  # it is for a Space, and none is named
        "csv": set(),
        "tensorboard": set(),
    }
