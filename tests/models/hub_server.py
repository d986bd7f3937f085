"""A hub on this machine: the routes by which huggingface_hub and modelscope list and download a model's files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Repositories = Mapping[str, Mapping[str, Mapping[str, bytes]]]
"""Name -> revision -> file -> bytes"""


class Hub(ThreadingHTTPServer):
    """Serves repositories, and remembers which files were fetched."""

    daemon_threads = True

    def __init__(self, repositories: Repositories) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = repositories
        self.fetched: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def commit_of(revision: str) -> str:
    """Return the forty digits that a revision resolves to."""
    return sha1(revision.encode())


def sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        path = [unquote(part) for part in parts.path.strip("/").split("/")]
        if path[:3] == ["api", "v1", "models"]:
            self._modelscope("/".join(path[3:5]), path[5:], query)
        elif path[:2] == ["api", "models"]:
            self._listing("/".join(path[2:4]), path[4:])
        elif path[2:3] == ["resolve"]:
            self._file("/".join(path[:2]), path[3], "/".join(path[4:]))
        else:
            self._answer(404, b"{}")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the tests quiet."""

    def _files(self, name: str, revision: str) -> Mapping[str, bytes] | None:
        """Return the files at a revision, or answer as the hub does and return None."""
        revisions = self.server.repositories.get(name)
        found = None
        for known, files in (revisions or {}).items():
            found = files if revision in {known, commit_of(known)} else found
        if found is None:
            code = "RepoNotFound" if revisions is None else "RevisionNotFound"
            self._answer(404, json.dumps({"error": code, "Success": False}).encode(), {"X-Error-Code": code})
        return found

    def _listing(self, name: str, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        files = self._files(name, revision)
        if files is None:
            return
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": sha1(data)} for file, data in files.items()
            ]
            self._answer(200, json.dumps(tree).encode())
            return
        known = self._known(name, revision)
        entries = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
        told = {"id": name, "modelId": name, "sha": commit_of(known), "siblings": entries}
        self._answer(200, json.dumps(told | {"private": False, "tags": [], "downloads": 0}).encode())

    def _known(self, name: str, revision: str) -> str:
        return next(each for each in self.server.repositories[name] if revision in {each, commit_of(each)})

    def _file(self, name: str, revision: str, file: str) -> None:
        files = self._files(name, revision)
        if files is None:
            return
        if file not in files:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = files[file]
        if self.command == "GET":
            self.server.fetched.append(f"{name}/{file}")
        commit = commit_of(self._known(name, revision))
        self._answer(200, data, {"ETag": f'"{sha1(data)}"', "X-Repo-Commit": commit})

    def _modelscope(self, name: str, rest: list[str], query: Mapping[str, str]) -> None:
        revision = query.get("Revision", "master")
        files = self._files(name, revision)
        if files is None:
            return
        if rest == ["repo"]:
            self._file(name, revision, query["FilePath"])
            return
        entries = [
            {
                "Name": file.rpartition("/")[2],
                "Path": file,
                "Type": "blob",
                "Size": len(data),
                "Sha256": hashlib.sha256(data).hexdigest(),
                "Revision": commit_of(revision),
            }
            for file, data in files.items()
        ]
        self._answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": entries}}).encode())

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | dict(headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def serving(repositories: Repositories) -> Iterator[Hub]:
    """Serve until the block ends."""
    hub = Hub(repositories)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
