"""A real HTTP server that answers /v1/completions as vLLM does, of models that plain transformers runs in float64.

    python tests/logprob_server.py FAULT_FILE MODEL_DIRECTORY...

The model in the directory NAME is served at /NAME/v1 as `tiny`, or as its file `served_as` says; the port is printed.
What stands in FAULT_FILE spoils answers, read anew at every request: `WORD`, or `WORD AFTER` to begin with the request
of that number. Every request leaves a line in FAULT_FILE.log.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LONGEST = 128


class Server(ThreadingHTTPServer):
    """Holds the models; one forward pass at a time."""

    daemon_threads = True

    def __init__(self, faults: Path, directories: list[Path]) -> None:
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

        super().__init__(("127.0.0.1", 0), Handler)
        self.models = {
            place.name: (
                AutoModelForCausalLM.from_pretrained(place).double().eval(),
                PreTrainedTokenizerFast.from_pretrained(place),
            )
            for place in directories
        }
        files = {place.name: place / "served_as" for place in directories}
        self.names = {name: file.read_text() if file.exists() else "tiny" for name, file in files.items()}
        self.faults, self.lock, self.asked = faults, threading.Lock(), 0

    def fault(self) -> str:
        """Count a request, and return what spoils its answer."""
        with self.lock:
            self.asked += 1
            word, _, after = self.faults.read_text().partition(" ") if self.faults.exists() else ("", "", "")
            return word if self.asked >= int(after or 0) else ""

    def logprobs(self, model: Any, tokens: list[int]) -> list[float | None]:
        import torch

        with self.lock, torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1]
            said = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return [None, *said.tolist()]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.server.names[self.path.split("/")[1]]
        self._send(200, {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": LONGEST}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.server.fault()
        with self.server.lock, Path(f"{self.server.faults}.log").open("a") as log:
            log.write(json.dumps({**asked, "key": self.headers.get("Authorization")}) + "\n")
        if fault == "500":
            return self._send(500, {"error": "out of memory"})
        if fault == "503-once" and self.server.asked % 3 == 0:
            return self._send(503, {"error": "busy"})
        if fault == "hangs":
            time.sleep(60)
        if fault == "dies":
            os._exit(1)
        if fault == "html":
            return self._send_bytes(200, b"<html>a proxy's page</html>")
        model, tokenizer = self.server.models[self.path.split("/")[1]]
        prompt = asked["prompt"]
        tokens = prompt if isinstance(prompt, list) else tokenizer.encode(prompt, add_special_tokens=False)
        if max(tokens) >= model.config.vocab_size or len(tokens) >= LONGEST:
            return self._send(400, {"error": {"message": f"Token id {max(tokens)} is out of vocabulary"}})
        body = json.dumps(self._answer(asked, tokens, self.server.logprobs(model, tokens), fault)).encode()
        return self._trickle(body) if fault == "trickles" else self._send_bytes(200, body)

    def _answer(self, asked: dict[str, Any], tokens: list[int], said: list[float | None], fault: str) -> dict[str, Any]:
        if fault == "nan":
            said[-1] = float("nan")
        if fault == "infinite":
            said[-1] = -9999.0
        if fault == "other-model":
            said[1:] = [value - 0.5 for value in said[1:] if value is not None]
        named = [token + 1 if fault == "other-tokens" and place else token for place, token in enumerate(tokens)]
        if fault == "short":
            said, named = said[:-2], named[:-2]
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length"}
        if "prompt_logprobs" in asked:
            entries = [{str(token): {"logprob": value, "rank": 1}} for token, value in zip(named, said, strict=True)]
            choice["prompt_logprobs"] = [None, *entries[1:]]
        elif asked.get("echo"):
            words = ["x" if fault == "names-no-tokens" else f"token_id:{token}" for token in named]
            made = [] if fault == "short" else [(-1.0, "token_id:7")]
            choice["logprobs"] = {
                "token_logprobs": [*said, *(value for value, _ in made)],
                "tokens": [*words, *(word for _, word in made)],
            }
        return {"id": "x", "model": "tiny", "choices": [choice], "usage": {"prompt_tokens": len(tokens)}}

    def _send(self, code: int, content: Any) -> None:
        self._send_bytes(code, json.dumps(content).encode())

    def _send_bytes(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _trickle(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for byte in body:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(0.2)

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests clean."""


class Served:
    """The server as a process of its own, seen from a test."""

    def __init__(self, port: int, faults: Path) -> None:
        self.port, self.faults = port, faults

    def url(self, name: str) -> str:
        """Return the address of one of the models."""
        return f"http://127.0.0.1:{self.port}/{name}/v1"

    def spoil(self, fault: str) -> None:
        """Spoil all answers from now on; an empty word mends them."""
        self.faults.write_text(fault)

    def asked(self) -> list[dict[str, Any]]:
        """Return what was asked so far."""
        log = Path(f"{self.faults}.log")
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@contextmanager
def served(program: Path | str, faults: Path, *directories: Path) -> Iterator[Served]:
    """Start the server, and end it with the block."""
    import subprocess

    command = [str(program), __file__, str(faults), *map(str, directories)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Served(int(process.stdout.readline()), faults)
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def main() -> None:
    faults, *directories = map(Path, sys.argv[1:])
    server = Server(faults, directories)
    print(server.server_port, flush=True)
    server.serve_forever(0.05)


if __name__ == "__main__":
    main()
