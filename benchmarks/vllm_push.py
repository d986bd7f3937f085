"""What a push of weights takes of memory, beyond the model, and how much of a step a proof is.

The receiving end is a process that says yes to everything. Memory is counted as the largest growth of this process,
with the files of buckets, which lie in memory too. The target is two buckets. The tensors are made as they are asked
for, as gathered ones are. Then the tokens that a proof scores, against those of steps; the target is 2 %.

    python benchmarks/vllm_push.py
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.features.vllm.buckets import Publisher
from holdfast.features.vllm.proof import Prover
from holdfast.features.vllm.servers import VLLMServer
from holdfast.models.files.conversion import Header

BUCKET_MIB, TENSOR_MIB, TENSORS, ROUNDS = 64, 16, 48, 5
FOLDER = Path("/dev/shm")  # noqa: S108 - as the default of rollout.engine.folder
STEPS = {"64 prompts x 8 completions x 1,024 tokens": 64 * 8 * 1024, "16 x 8 x 256": 16 * 8 * 256, "8 x 4 x 64": 2048}
_M_MMAP_THRESHOLD = -3
"""As malloc.h has it."""
BLOCK = 16
"""Of a GPU's cache; 128 on a CPU."""


def serve() -> None:
    """Say yes for ever; print the port first."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_POST(self) -> None:  # noqa: N802 - its name there
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Make tensors one after the other."""
    for number in range(TENSORS):
        yield f"layer-{number:02d}", torch.full((TENSOR_MIB * 2**18,), float(number))


def resident() -> int:
    """Return this process's memory in bytes, files that it maps left out."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Looks at memory and files every two milliseconds."""

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier round freed would be taken again without a trace
        self._before = resident()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._stop.is_set():
            files = sum(file.stat().st_size for file in FOLDER.glob("holdfast-*.safetensors") if file.exists())
            self.most = max(self.most, resident() - self._before + files)
            time.sleep(0.002)

    def __enter__(self) -> Watch:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._stop.set()
        self._thread.join()


def main() -> int:
    """Print both; 1 if a push takes more than two buckets."""
    # Else the allocator keeps what was freed, to its own rules, and that would be counted.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    process = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        server = VLLMServer.of(url, VLLMEngineConfig(url=[url]))
        headers = {f"layer-{n:02d}": Header((TENSOR_MIB * 2**18,), torch.float32) for n in range(TENSORS)}
        shares = []
        for number in range(ROUNDS + 1):
            publisher = Publisher(FOLDER, BUCKET_MIB)
            with Watch() as watch:
                publisher.push([server], tensors(), headers, f"v{number}")
            if number:  # the first one warms up
                shares.append(watch.most / (BUCKET_MIB * 2**20))
    finally:
        process.kill()
        process.wait()
    rounds = ", ".join(f"{share:.2f}" for share in shares)
    print(f"a push of {TENSORS * TENSOR_MIB} MiB in buckets of {BUCKET_MIB} MiB takes {rounds} buckets of memory")
    proof = sum(Prover(None, BLOCK, longest=1024).lengths)
    for name, tokens in STEPS.items():
        print(f"a proof scores {proof} tokens: {proof / tokens:.2%} of a step of {name}")
    return int(max(shares) > 2)


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["serve"] else main())
