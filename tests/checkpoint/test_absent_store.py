"""Object stores that nobody answers for: one paragraph, the same on every rank, before anything is made."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from holdfast.checkpoint.place.storage import open_storage
from holdfast.parallel.mesh import World
from tests.checkpoint.store import serving
from tests.training.cases import run, tree

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def nobody_there(tmp_path: Path) -> dict[str, str]:
    """Return an environment that leads to a closed port, asks once, and knows no credentials of this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{closed_port()}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }


def run_with(world: World, values: dict[str, Any], variables: dict[str, str]) -> Any:
    """Run in another environment; fsspec keeps the clients that were made in one."""
    before = dict(os.environ)
    S3FileSystem.clear_instance_cache()
    for name in KEYS:
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        return run(world, values)
    finally:
        os.environ.clear()
        os.environ.update(before)
        S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("keys", "place", "words"),
    [
        (KEYS, "s3://absent/run", "EndpointConnectionError: Could not connect to the endpoint URL"),
        ({}, "s3://nameless/run", "NoCredentialsError: Unable to locate credentials"),
    ],
)
def test_a_run_whose_store_does_not_answer_is_refused_on_all_ranks_and_leaves_nothing(
    pools: Any, tmp_path: Path, keys: dict[str, str], place: str, words: str
) -> None:
    values = tree(str(tmp_path / "runs"), checkpoint={"storage": place})

    errors = pools(2).errors(run_with, values, nobody_there(tmp_path) | keys)

    assert errors[0] == errors[1]
    assert errors[0][0] == "ConfigError"
    assert errors[0][1].startswith(f"{place}, where this run's checkpoints are, cannot be read: {words}")
    assert not (tmp_path / "runs").exists()


def test_every_call_of_a_store_that_does_not_answer_raises_what_a_file_system_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (nobody_there(tmp_path) | KEYS).items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    storage = open_storage("s3://silent/run")

    def create() -> None:
        with storage.create("a") as file:
            file.write(b"x")

    calls = {
        "create": create,
        "open": lambda: storage.open("a"),
        "read": lambda: storage.read("a"),
        "hash": lambda: storage.hash("a"),
        "size": lambda: storage.size("a"),
        "exists": lambda: storage.exists("a"),
        "is_file": lambda: storage.is_file("a"),
        "names": storage.names,
        "files": lambda: storage.files("a"),
        "put_new": lambda: storage.put_new("a", b"x"),
        "replace": lambda: storage.replace("a", b"x"),
        "rename": lambda: storage.rename("a", "b"),
        "remove": lambda: storage.remove("a"),
    }
    for name, call in calls.items():
        with pytest.raises(OSError, match="EndpointConnectionError") as raised:
            call()
        assert raised.value.errno == errno.EIO, name
    S3FileSystem.clear_instance_cache()


def test_a_store_that_falls_silent_in_the_middle_of_an_object_is_an_error_of_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3FileSystem.clear_instance_cache()
    with serving() as (_, process):
        storage = open_storage("s3://bucket/silent")
        data = os.urandom(64 * 2**20)
        storage.put_new("object", data)
        with storage.open("object") as file:
            assert file.read(2**20) == data[: 2**20]
            assert file.seek(-10, os.SEEK_END) == len(data) - 10
            assert file.read() == data[-10:]
            file.seek(2**20)
            process.kill()
            process.wait()
            with pytest.raises(OSError, match="EndpointConnectionError|ClientConnectorError|Connection"):
                file.read()
    S3FileSystem.clear_instance_cache()
