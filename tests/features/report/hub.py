"""A hub on loopback: what huggingface_hub asks of one to make a repository, look at it and commit to it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test_token"  # noqa: S105 - of the server below


@dataclass
class Asked:
    """A request as it came over the wire."""

    method: str
    path: str
    body: bytes
    authorization: str


@dataclass
class Hub:
    """What the server holds, and what it was asked."""

    address: str = ""
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: private, head, files by name with content and whether they are in LFS."""
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    refuse: int | None = None
    """Status that every commit is refused with."""
    damage: str | None = None
    """Name of a file that arrives with other bytes."""

    def add(self, name: str, files: dict[str, bytes], *, private: bool = True) -> None:
        held = {path: (content, False) for path, content in files.items()}
        self.repositories[name] = {"private": private, "head": "0" * 40, "files": held}

    def files(self, name: str) -> dict[str, bytes]:
        return {path: content for path, (content, _) in self.repositories[name]["files"].items()}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline().strip(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, values: object, error: str = "") -> None:
        data = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _serve(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        authorization = self.headers.get("Authorization", "")
        if path == "/api/agent-harnesses":  # the client's own list of programs, which it asks every hub for
            return self._answer(404, {})
        self.hub.asked.append(Asked(self.command, self.path, body, authorization))
        if path.startswith("/upload/"):
            self.hub.objects[path.removeprefix("/upload/")] = body
            return self._answer(200, {})
        if authorization != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid credentials"})
        if path == "/api/repos/create":
            values = json.loads(body)
            name = "/".join(filter(None, (values.get("organization"), values["name"])))
            private = values.get("visibility") == "private" or values.get("private") is True
            self.hub.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private)
            return self._answer(200, {"url": f"{self.hub.address}/{name}", "name": name})
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._answer(200, self._batch(json.loads(body)))
        name = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        rest = path.removeprefix(f"/api/models/{name}")
        if name not in self.hub.repositories:
            return self._answer(404, {"error": "Repository not found"}, "RepoNotFound")
        repository = self.hub.repositories[name]
        if self.command == "GET":
            return self._answer(200, self._info(name, repository))
        if rest.startswith("/preupload/"):
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": modes})
        if rest.startswith("/commit/"):
            return self._commit(name, repository, body)
        return self._answer(404, {"error": f"nothing at {path}"})

    do_GET = do_POST = do_PUT = do_HEAD = _serve  # noqa: N815 - the names are Python's

    def _batch(self, values: dict[str, Any]) -> dict[str, Any]:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.address}/upload/{each['oid']}"}}}
            for each in values["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def _info(self, name: str, repository: dict[str, Any]) -> dict[str, Any]:
        siblings = []
        for path, (content, in_lfs) in repository["files"].items():
            blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
            entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob}
            if in_lfs:
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        return {"id": name, "private": repository["private"], "sha": repository["head"], "siblings": siblings}

    def _commit(self, name: str, repository: dict[str, Any], body: bytes) -> None:
        if self.hub.refuse is not None:
            return self._answer(self.hub.refuse, {"error": "you may not"})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") not in {None, repository["head"]}:
                return self._answer(412, {"error": "A commit has happened since."})
            if line["key"] == "file":
                repository["files"][value["path"]] = (base64.b64decode(value["content"]), False)
            if line["key"] == "lfsFile":
                repository["files"][value["path"]] = (self.hub.objects[value["oid"]], True)
        if self.hub.damage is not None:
            content, in_lfs = repository["files"][self.hub.damage]
            repository["files"][self.hub.damage] = (bytes([content[0] ^ 1]) + content[1:], in_lfs)
        repository["head"] = hashlib.sha1(body, usedforsecurity=False).hexdigest()
        url = f"{self.hub.address}/{name}/commit/{repository['head']}"
        return self._answer(200, {"success": True, "commitOid": repository["head"], "commitUrl": url})


@contextmanager
def serving() -> Iterator[Hub]:
    """Yield a hub that answers until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
