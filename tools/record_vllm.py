"""Record what a real server of vLLM answers, for the contract test that needs none: record_vllm.py URL

Start the server by `holdfast serve`; the answers go to tests/features/vllm/vllm_replies/, one JSON file each, with what
was asked. Run it anew for another version of vLLM, and read the difference.
"""

from __future__ import annotations

import http.client
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FOLDER = Path(__file__).parents[1] / "tests" / "rollout" / "vllm_replies"
PROMPT = [5, 9, 17, 33, 12]
SAMPLING = {"max_tokens": 6, "temperature": 0.7, "seed": 7, "logprobs": 0, "detokenize": False, "ignore_eos": True}
HOLDER = {"token": "recorded", "host": "here", "pid": 1, "machine": []}
ASKED: dict[str, tuple[str, str, Any]] = {
    "generate": ("POST", "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": SAMPLING}),
    "stop": (
        "POST",
        "/inference/v1/generate",
        {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "stop_token_ids": list(range(64))}},
    ),
    "no_logprobs": (
        "POST",
        "/inference/v1/generate",
        {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "logprobs": None}},
    ),
    "prompt_logprobs": (
        "POST",
        "/inference/v1/generate",
        {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "max_tokens": 1, "logprobs": 20, "prompt_logprobs": 20}},
    ),
    "cut_by_the_context": (
        "POST",
        "/inference/v1/generate",
        {"token_ids": [5] * 250, "sampling_params": {**SAMPLING, "max_tokens": 20}},
    ),
    "prompt_too_long": ("POST", "/inference/v1/generate", {"token_ids": [5] * 300, "sampling_params": SAMPLING}),
    "unknown_token": ("POST", "/inference/v1/generate", {"token_ids": [5, 99999], "sampling_params": SAMPLING}),
    "models": ("GET", "/v1/models", None),
    "identity": ("POST", "/collective_rpc", {"method": "holdfast_identity"}),
    "lease": ("POST", "/collective_rpc", {"method": "holdfast_lease", "kwargs": {"holder": HOLDER, "seconds": 0.0}}),
    "unknown_method": ("POST", "/collective_rpc", {"method": "no_such_method"}),
    "update_without_start": ("POST", "/update_weights", {"update_info": {"file": "/nowhere", "hashes": {}}}),
    "version": ("GET", "/version", None),
}


def main() -> None:
    """Ask everything once."""
    place = urlsplit(sys.argv[1])
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (method, path, content) in ASKED.items():
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
        body = None if content is None else json.dumps(content)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        record = {"method": method, "path": path, "content": content, "status": response.status, "answer": text}
        (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {response.status}, {len(text)} bytes")


if __name__ == "__main__":
    main()
