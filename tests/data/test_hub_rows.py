"""Data sets by hub name, from an HTTP server on this machine that answers the routes of the real one.

The library reads HF_ENDPOINT when it is imported, so the cases run in one process of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROWS = [{"question": f"q{number}", "answer": f"a{number}"} for number in range(5)]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "lab/sums": {"train.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode()},
    "lab/script": {"script.py": b"raise SystemExit('code from the hub ran')"},
}

CASES: dict[str, dict[str, Any]] = {
    "rows": {"path": "lab/sums", "columns": {"prompt": "question"}},
    "limited": {"path": "lab/sums@train", "max_samples": 2},
    "sliced": {"path": "lab/sums@train[1:3]"},
    "streamed": {"path": "lab/sums", "streaming": True},
    "no such split": {"path": "lab/sums@test"},
    "no such split, streamed": {"path": "lab/sums@test", "streaming": True},
    "no such configuration": {"path": "lab/sums", "config_name": "main"},
    "no such name": {"path": "lab/other"},
    "code": {"path": "lab/script"},
}

PROGRAM = """
import json, sys
from pathlib import Path
from holdfast.config.sections.data import SourceConfig
from holdfast.data.rows.rows import open_source
from holdfast.errors import DataError
results = {}
for name, options in json.loads(sys.argv[1]).items():
    try:
        source = open_source(SourceConfig(**options), Path.cwd())
        results[name] = {
            "name": source.name, "size": source.size, "fingerprint": source.fingerprint,
            "rows": list(source.scan(0)), "tail": list(source.scan(1)),
        }
    except DataError as error:
        results[name] = {"error": str(error)}
print(json.dumps(results))
"""


class Hub(BaseHTTPRequestHandler):
    """Answers what the library asks for a public data set."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        name = "/".join(path.removeprefix("/api").removeprefix("/datasets/").split("/")[:2])
        files = FILES.get(name)
        if files is None:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        entries = [
            {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for file, content in files.items()
        ]
        if path.startswith("/api"):
            if path.endswith("/data"):
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            if "/tree/" in path:
                return self._send(200, json.dumps(entries).encode(), {})
            siblings = [{"rfilename": file} for file in files]
            return self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode(), {})
        content = files.get(path.split("/", 6)[-1])
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        tag = f'"{hashlib.sha1(content).hexdigest()}"'
        return self._send(200, content, {"ETag": tag, "X-Repo-Commit": COMMIT})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    home = tmp_path_factory.mktemp("hub")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(home),
            "HF_DATASETS_CACHE": str(home / "datasets"),
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(CASES)],
            env=environment, cwd=home, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        server.shutdown()
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout)


@pytest.mark.slow
def test_a_hub_name_gives_rows_by_number_under_our_column_names(results: dict[str, Any]) -> None:
    found = results["rows"]

    assert found["rows"] == [{"prompt": row["question"], "answer": row["answer"]} for row in ROWS]
    assert (found["name"], found["size"]) == ("sums", 5)


def test_a_split_a_slice_and_a_limit_are_respected(results: dict[str, Any]) -> None:
    assert results["limited"]["rows"] == ROWS[:2]
    assert results["sliced"]["rows"] == ROWS[1:3]


def test_a_streamed_name_is_read_from_any_row(results: dict[str, Any]) -> None:
    assert results["streamed"]["rows"] == ROWS
    assert results["streamed"]["tail"] == ROWS[1:]
    assert results["streamed"]["size"] is None


def test_the_fingerprint_says_which_split_and_options(results: dict[str, Any]) -> None:
    fingerprints = [results[name]["fingerprint"] for name in ("rows", "limited", "sliced", "streamed")]

    assert len(set(fingerprints)) == 4


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no such split", 'Unknown split "test"'),
        ("no such split, streamed", "Bad split: test"),
        ("no such configuration", "BuilderConfig 'main' not found"),
        ("no such name", "doesn't exist on the Hub"),
        ("code", "Dataset scripts are no longer supported"),
    ],
)
def test_what_the_hub_lacks_is_one_paragraph_with_the_local_path_tried(
    case: str, message: str, results: dict[str, Any]
) -> None:
    error = results[case]["error"]

    assert message in error
    assert f"no such file or directory: {Path('/')}" in error
    assert "\n" not in error
