"""What a reply of a server costs this process: 256 tokens with log-probabilities, in CPU time, 64 requests at a time.

The server is a process of its own that answers what a real vLLM answered (tests/features/vllm/vllm_replies), lengthened
to 256 tokens; so what is measured is the client alone. Both arms run in turn: connections that stay open, which
rollouts use, and a new one for each request. The target is 3 ms a reply. Then 1,000 requests at
once: no descriptor may stay.

    python benchmarks/vllm_client.py
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.features.vllm.prompts import ServedPrompt
from holdfast.features.vllm.servers import VLLMServer, sampling_words

TOKENS, AT_A_TIME, REPLIES, ROUNDS = 256, 64, 1000, 5
TARGET_MS = 3.0
RECORD = Path(__file__).parents[1] / "tests" / "rollout" / "vllm_replies" / "generate.json"


def answer() -> bytes:
    """Return a real answer, lengthened."""
    told = json.loads(json.loads(RECORD.read_text())["answer"])
    choice = told["choices"][0]
    content = choice["logprobs"]["content"]
    choice["logprobs"]["content"] = (content * (TOKENS // len(content) + 1))[:TOKENS]
    choice["token_ids"] = [entry["token_id"] for entry in choice["logprobs"]["content"]]
    choice["weight_versions"][0]["end"] = TOKENS
    return json.dumps(told).encode()


def serve() -> None:
    """Answer the same for ever; print the port first."""
    content = answer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def log_message(self, *_: object) -> None:
            return

        def do_POST(self) -> None:  # noqa: N802 - its name there
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 1024

    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def measure(server: VLLMServer, at_a_time: int) -> float:
    """Return milliseconds of CPU for a reply."""
    words = sampling_words(SamplingConfig(max_new_tokens=TOKENS), [2])
    prompt = ServedPrompt(list(range(4, 60)))
    before = resource.getrusage(resource.RUSAGE_SELF)
    with ThreadPoolExecutor(at_a_time) as threads:
        replies = list(
            threads.map(lambda number: server.complete(str(number), prompt, words | {"seed": number}), range(REPLIES))
        )
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert all(reply.tokens.size == TOKENS for reply in replies)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds * 1000 / REPLIES


def main() -> int:
    """Print both arms; 1 if the target is missed."""
    process = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        kept = VLLMServer.of(url, VLLMEngineConfig(url=[url]))
        new = replace(kept, endpoint=replace(kept.endpoint, keeps_open=False))
        measure(kept, AT_A_TIME)
        kept.close()
        opened = len([*Path("/proc/self/fd").iterdir()])
        arms: dict[str, list[float]] = {"connections stay open": [], "a new one each": []}
        for _ in range(ROUNDS):
            arms["connections stay open"].append(measure(kept, AT_A_TIME))
            arms["a new one each"].append(measure(new, AT_A_TIME))
        began = time.monotonic()
        thousand = measure(kept, REPLIES)
        seconds = time.monotonic() - began
        kept.close()
        left = len([*Path("/proc/self/fd").iterdir()]) - opened
    finally:
        process.kill()
        process.wait()
    for name, values in arms.items():
        print(f"{name}: {statistics.median(values):.2f} ms of CPU a reply (worst round {max(values):.2f})")
    ratios = [a / b for a, b in zip(*arms.values(), strict=True)]
    print(f"ratio, round by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    print(
        f"{REPLIES} requests at once: {thousand:.2f} ms of CPU a reply in {seconds:.1f} s; descriptors left {left}, "
        f"threads {threading.active_count()}"
    )
    return int(max(arms["connections stay open"]) > TARGET_MS or left > 0)


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["serve"] else main())
