"""`holdfast push`: by huggingface_hub's own client against a server on loopback, whose requests are looked at."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.checkpoint.export.about import Exported
from holdfast.checkpoint.export.card import CARD, card_of, laid_cards
from holdfast.checkpoint.place.hashing import hash_bytes
from tests.cli.fixtures import HOLDFAST
from tests.features.report.hub import TOKEN, Hub, serving
from tests.features.trackers.test_secrets import SECRETS, planted

WEIGHTS = bytes(range(256)) * 64
PRIVATE = {
    "samples.jsonl": "a prompt\n",
    "rank-0.log": "a log\n",
    "optimizer.pt": "a pickle",
    "pytorch_model.bin": "a pickle",
    "modeling_own.py": "code",
    "completions.parquet": "x",
    ".env": "HF_TOKEN=planted",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Return an export as the code of exports lays it, with other things beside that must stay."""
    place = tmp_path / "final"
    place.mkdir()
    (place / "model.safetensors").write_bytes(WEIGHTS)
    (place / "config.json").write_text("{}")
    (place / "holdfast.yaml").write_text("model: {path: /home/planted/model}\nserver: https://user:planted@host/v1\n")
    files = {"model.safetensors": {"size": len(WEIGHTS), "xxh3_128": hash_bytes(WEIGHTS)}}
    parent = {"model": "/home/planted/model", "adapters": "/planted/lora", "init_from": "s3://me:planted@bucket/step-1"}
    about = Exported("1" * 32, "tiny", 40, parent=parent, files=files)
    (place / "holdfast_export.json").write_text(about.text())
    (place / CARD).write_text(card_of({}, "sft", about, {"eval/s/loss": 0.5}, {}).text(files, adapter=False))
    for name, text in PRIVATE.items():
        (place / name).write_text(text)
    (place / "logs").mkdir()
    return place


@dataclass
class Done:
    code: int
    out: str
    err: str


def push(hub: Hub, export: Path, *arguments: str, token: str | None = TOKEN) -> Done:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    variables |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(export.parent / "home"), "HF_HUB_DISABLE_XET": "1"}
    variables |= {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | ({"HF_TOKEN": token} if token else {})
    command = [HOLDFAST, "push", str(export), "me/tiny", *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def test_a_new_repository_is_private_and_holds_the_models_own_files(hub: Hub, export: Path) -> None:
    done = push(hub, export)

    assert done.code == 0, done.err
    assert hub.repositories["me/tiny"]["private"] is True
    (made,) = [json.loads(asked.body) for asked in hub.asked if asked.path == "/api/repos/create"]
    assert made == {"name": "tiny", "organization": "me", "visibility": "private"}
    files = hub.files("me/tiny")
    assert set(files) == {
        ".gitattributes", "README.md", "config.json", "holdfast.yaml", "holdfast_export.json", "model.safetensors"
    }  # fmt: skip
    assert files["model.safetensors"] == WEIGHTS
    assert files["README.md"] == (export / "README.md").read_bytes()
    assert "is made, private" in done.out
    assert "verified: the hub's hashes of all 5 files are ours" in done.out
    assert "left out, since only a model's own files are published: .env, completions.parquet, logs" in done.out


@pytest.mark.slow
def test_no_request_carries_what_must_stay(hub: Hub, export: Path) -> None:
    push(hub, export)

    sent = b"\n".join(asked.path.encode() + b"\n" + asked.body for asked in hub.asked)
    for content in hub.files("me/tiny").values():
        sent += content
    assert len(hub.asked) >= 6
    assert b"planted" not in sent
    for name, text in PRIVATE.items():
        assert name.encode() not in sent
        assert len(text) < 5 or text.encode() not in sent
    assert all(asked.authorization == f"Bearer {TOKEN}" for asked in hub.asked if asked.path.startswith("/api"))
    assert not any(asked.authorization for asked in hub.asked if asked.path.startswith("/upload"))


@pytest.mark.slow
def test_a_second_push_sends_nothing(hub: Hub, export: Path) -> None:
    push(hub, export)
    before = len(hub.asked)

    done = push(hub, export)

    assert done.code == 0
    assert "me/tiny has all 5 files already" in done.out
    assert [asked.method for asked in hub.asked[before:]] == ["GET"]


@pytest.mark.slow
def test_other_contents_are_replaced_only_by_a_word(hub: Hub, export: Path) -> None:
    hub.add("me/tiny", {"README.md": b"theirs", "notes.txt": b"stay"})

    refused = push(hub, export)
    there = hub.files("me/tiny")
    replaced = push(hub, export, "--overwrite")

    assert refused.code == 2
    assert "has other contents under 1 of the names: README.md. Nothing was sent." in refused.err
    assert there == {"README.md": b"theirs", "notes.txt": b"stay"}
    assert replaced.code == 0, replaced.err
    assert hub.files("me/tiny")["README.md"] == (export / "README.md").read_bytes()
    assert hub.files("me/tiny")["notes.txt"] == b"stay"


@pytest.mark.slow
def test_a_public_repository_is_written_only_by_a_word(hub: Hub, export: Path) -> None:
    hub.add("me/tiny", {}, private=False)

    refused, allowed = push(hub, export), push(hub, export, "--public")

    assert refused.code == 2
    assert "me/tiny is public. Give --public" in refused.err
    assert allowed.code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("status", "words"), [(403, "may not write there"), (413, "larger than the hub takes")])
def test_a_hub_that_refuses_is_one_paragraph(hub: Hub, export: Path, status: int, words: str) -> None:
    hub.refuse = status

    done = push(hub, export)

    assert done.code == 2
    assert f"The hub refused me/tiny ({status}): you may not" in done.err
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_without_credentials_nothing_is_asked(hub: Hub, export: Path) -> None:
    done = push(hub, export, token=None)
    wrong = push(hub, export, token="hf_wrong")  # noqa: S106 - of the server here

    assert done.code == wrong.code == 2
    assert "Nobody is logged in to the hub: run `hf auth login`, or set HF_TOKEN" in done.err
    assert "(401)" in wrong.err
    assert all(asked.authorization == "Bearer hf_wrong" for asked in hub.asked)


@pytest.mark.slow
def test_what_arrived_wrong_is_told(hub: Hub, export: Path) -> None:
    hub.damage = "model.safetensors"

    done = push(hub, export)

    assert done.code == 3
    assert "does not hold what was sent: model.safetensors differ by size or hash" in done.err


@pytest.mark.slow
def test_changed_weights_and_other_directories_are_refused_before_anything_is_asked(hub: Hub, export: Path) -> None:
    (export / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"x")
    (export.parent / "other").mkdir()

    changed, other = push(hub, export), push(hub, export.parent / "other")

    assert (changed.code, other.code) == (2, 2)
    assert "has other bytes" in changed.err
    assert "is not an export of Holdfast" in other.err
    assert hub.asked == []


@pytest.mark.slow
def test_an_export_that_is_not_there_is_told_with_the_run_that_would_write_it(hub: Hub, tmp_path: Path) -> None:
    done = push(hub, tmp_path / "runs/run/exports/final")

    assert done.code == 2
    assert f"There is no directory {tmp_path}/runs/run/exports/final" in done.err
    assert f"The run in {tmp_path}/runs/run would write it at its end" in done.err
    assert hub.asked == []


@pytest.mark.slow
def test_a_hub_that_is_not_there_is_one_paragraph(export: Path) -> None:
    with serving() as hub:
        pass

    done = push(hub, export)

    assert done.code == 2
    assert "The hub cannot be reached for me/tiny" in done.err
    assert "Traceback" not in done.err


def test_a_card_of_a_users_own_is_not_lost(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / CARD).write_text("the base's own card")
    about = Exported("1" * 32, "tiny", 40)
    ours = card_of({}, "sft", about, {}, {}).text({}, adapter=False)

    first = laid_cards(ours, target, source)
    (target / CARD).write_text(first[CARD])
    second = laid_cards(ours, target, source)
    (target / CARD).write_text(first[CARD] + "\nand a word of mine\n")
    third = laid_cards(ours, target, None)

    assert first == second == {CARD: ours, "README.base.md": "the base's own card"}
    assert third[CARD].endswith("a word of mine\n")
    assert third["README.holdfast.md"] == ours


def test_no_planted_secret_is_in_a_card(tmp_path: Path) -> None:
    tree = planted() | {
        "model": {
            "path": f"/home/{SECRETS[20]}/model",
            "revision": f"https://user:{SECRETS[10]}@host/x?y={SECRETS[11]}",
        },
        "reward": [{"kind": "path", "path": f"/home/{SECRETS[21]}/reward.py:f", "kwargs": {"key": SECRETS[0]}}],
        "objective": {"kind": "path", "api_key": SECRETS[1], "path": f"/home/{SECRETS[22]}/loss.py:f"},
        "advantage": {"kind": "path", "kwargs": {"hf-token": SECRETS[23]}},
    }
    tree["data"] |= {"sources": [{"path": f"/home/{SECRETS[24]}/a.jsonl"}, {"name": f"https://u:{SECRETS[12]}@h/rows"}]}
    parent = {
        "model": f"/home/{SECRETS[25]}/m",
        "export": {"run": f"/x/{SECRETS[26]}/r", "step": 1, "run_id": "a", "weights": "b"},
    }
    about = Exported("1" * 32, "tiny", 40, parent=parent)

    card = card_of(tree, "grpo", about, {}, {"rows of source 0": "f" * 32}).text({}, adapter=False)

    assert "a.jsonl" in card
    assert "reward.py:f" in card
    assert [secret for secret in SECRETS if secret in card] == []
