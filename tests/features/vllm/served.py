"""A server that speaks as vLLM does where runs ask it, and computes with plain transformers on what is pushed to it.

Its wire format is that of the recorded replies (`vllm_replies/`); what it samples comes from the bytes that arrived, so
log-probabilities of its samples are an oracle of a push. It can be slow, wrong, or another one than a run needs.
"""

from __future__ import annotations

import copy
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
import xxhash
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

import holdfast.features.vllm.servers
from holdfast.features.vllm.adapters import file_digest
from holdfast.features.vllm.servers import ROUTES

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
}
PREFIX = "generate-tokens-"


def of_the_extension(first: str, behind: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the names of a part of what workers of vLLM import; its imports of vLLM are left out."""
    source = Path(holdfast.features.vllm.servers.__file__).with_name("extension.py").read_text()
    part = source[source.index(first) : source.index(behind)]
    names: dict[str, Any] = {
        "dataclass": dataclass, "functools": functools, "json": json, "Path": Path, "Tokenizer": Tokenizer,
        "xxhash": xxhash, "Any": Any, "__name__": __name__, **(more or {}),
    }  # fmt: skip
    exec(compile("from __future__ import annotations\n" + part, "extension", "exec"), names)  # noqa: S102
    return names


@dataclass
class ServedModel:
    """What the server holds, and how it behaves."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Over those of a server that fits."""
    seconds: float = 0.0
    """Of each completion, at least."""
    slow: Callable[[int], float] = lambda seed: 0.0
    """Seconds of a completion besides, by its seed; of those after the first `slow_after`."""
    slow_after: int = 0
    before_token: Callable[[str, int], None] = lambda name, number: None
    """Called with the name of a sample's request and the number of its next token."""
    answer: Callable[[str, Any], Any] = lambda path, told: told
    """Spoils answers."""
    garble: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda tensors: tensors
    """Spoils a bucket behind the checks."""
    adapter_rank: int | None = None
    """Largest rank of the adapters that it takes; None for none."""
    spoil: Callable[[Path], None] = lambda directory: None
    """Spoils the files of an adapter behind the checks."""
    taken: Callable[[str, Any], Any] = lambda label, model: model
    """Takes something else in the place of an adapter."""
    has_name: Callable[[str], bool] = lambda label: False
    """Whether an adapter of a name was loaded before the run came."""
    adapters: dict[str, Any] = field(default_factory=dict)
    """Models with adapters by the names of these."""
    file_bytes: list[int] = field(default_factory=list)
    """Bytes of the weights of each bucket and each adapter."""
    tells: frozenset[str] | None = None
    """Tensors whose layers tell what they compute with; None for all."""
    lost: bool = False
    """Whether the method that asks layers is not there."""
    counters: Callable[[], str] = lambda: ""
    """The text of its metrics."""
    events: list[tuple[float, str]] = field(default_factory=list)
    """What happened when, on the monotonic clock."""
    on_event: Callable[[], None] = lambda: None
    """Called after each event, by one thread at a time."""
    before_push: Callable[[int], None] = lambda pushed: None
    """Called with the number of pushes so far before another one begins."""
    version: str = "none"
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    busy: Callable[[str], bool] = lambda path: False
    """Whether a path answers 503, and does nothing."""
    refused: frozenset[str] = frozenset()
    """Paths that are not there."""

    def __post_init__(self) -> None:
        config = Qwen3Config(**{k: v for k, v in MODEL.items() if k != "model_type"} | {"tie_word_embeddings": False})
        self.model = Qwen3ForCausalLM(config).eval()
        self.lock, self.noting = threading.Condition(), threading.Lock()
        self.lease = of_the_extension("@dataclass\nclass Lease", "_LEASE = ")["Lease"]()
        self.paused = False
        self.aborted: set[str] = set()
        self.alive = True
        self.count = 0

    def note(self, what: str) -> None:
        with self.noting:
            self.events.append((time.monotonic(), what))
            self.on_event()

    def count_of(self, word: str) -> int:
        """Return how many events begin with a word."""
        return sum(what.startswith(word) for _, what in self.events)

    def post(self, path: str, query: Mapping[str, list[str]], asked: Any) -> Any:
        """Do what is asked, and return the answer."""
        match path:
            case "/collective_rpc":
                return {"results": [self.called(asked["method"], asked.get("kwargs", {}))]}
            case "/v1/load_lora_adapter":
                return self.load_adapter(asked["lora_name"], Path(asked["lora_path"]))
            case "/v1/unload_lora_adapter":
                del self.adapters[asked["lora_name"]]
                self.note(f"unloaded {asked['lora_name']}")
                return b"Success: removed"
            case "/sleep" | "/wake_up":
                self.note("sleeps" if path == "/sleep" else "wakes")
            case "/pause":
                self.before_push(self.count_of("pushed"))
                with self.lock:
                    self.paused = True
                    if query["mode"] == ["abort"]:
                        self.aborted.add("")
            case "/resume":
                with self.lock:
                    self.paused = False
                    self.aborted.discard("")
                    self.lock.notify_all()
            case "/update_weights":
                self.file_bytes.append(Path(asked["update_info"]["file"]).stat().st_size)
                self.tensors |= self.garble(load_file(asked["update_info"]["file"]))
            case "/finish_weight_update":
                with self.lock:
                    self.model.load_state_dict(self.tensors)
                    self.version = asked["weight_version"]
                self.note("pushed")
            case "/abort_requests":
                with self.lock:
                    self.aborted |= set(asked["request_ids"])
                    self.lock.notify_all()
            case "/inference/v1/generate":
                return self.generate(asked)
        return {}

    def called(self, method: str, kwargs: dict[str, Any]) -> Any:
        """Return what our extension of the workers returns."""
        match method:
            case "holdfast_inspect":
                return self.inspect(load_file(kwargs["file"]))
            case "holdfast_digests":
                directory = Path(kwargs["directory"])
                return {name: file_digest(directory / name) for name in kwargs["names"]}
            case "holdfast_lease":
                return self.lease.ask(**kwargs, clock=time.monotonic())
        return self.identity()

    def load_adapter(self, label: str, directory: Path) -> bytes:
        """Merge an adapter into a copy of the base."""
        self.file_bytes.append((directory / "adapter_model.safetensors").stat().st_size)
        self.spoil(directory)
        settings = json.loads((directory / "adapter_config.json").read_text())
        factors = load_file(directory / "adapter_model.safetensors")
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, a in factors.items():
                if ".lora_A." in name:
                    layer = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
                    b = factors[name.replace(".lora_A.", ".lora_B.")]
                    model.get_submodule(layer).weight += settings["lora_alpha"] / settings["r"] * (b @ a)
        self.adapters[label] = self.taken(label, model)
        self.note(f"loaded {label}")
        return b"Success: added"

    def identity(self) -> dict[str, Any]:
        return {
            "identity": f"served-{id(self)}",
            "holder": self.lease.living(time.monotonic()),
            "backend": "holdfast",
            "dtype": "torch.float32",
            "longest": 256,
            "vocabulary": MODEL["vocab_size"],
            "logprobs": "processed_logprobs",
            "tied": False,
            "block": 16,
            "device": "cpu",
            "experts": False,
            "workers": 1,
            "adapter_rank": self.adapter_rank,
            "version": "0.32.0+cpu",
            "tokenizer": None,
            "template": None,
        } | self.facts

    def inspect(self, sent: dict[str, torch.Tensor]) -> dict[str, float | None]:
        has = self.model.state_dict()
        tells = sent.keys() if self.tells is None else self.tells
        return {name: float((has[name] - value).abs().max()) if name in tells else None for name, value in sent.items()}

    @torch.no_grad()
    def logits(self, model: Any, tokens: list[int]) -> torch.Tensor:
        return model(input_ids=torch.tensor([tokens])).logits[0]

    def generate(self, asked: Any) -> Any:
        sampling, name = asked["sampling_params"], PREFIX + asked.get("request_id", "proof")
        tokens, content, spans, finish = list(asked["token_ids"]), [], [], "length"
        prompt, count, model = len(tokens), sampling["max_tokens"], self.adapters.get(asked["model"], self.model)
        is_sample = "seed" in sampling
        seconds = self.seconds if is_sample else 0.0
        if is_sample:
            self.note(f"asked {asked['request_id']}")
            with self.lock:
                self.count += 1
                own = self.count
            seconds += self.slow(sampling["seed"]) if own > self.slow_after else 0.0
        draw = np.random.default_rng(sampling.get("seed", 0))
        for number in range(count):
            if is_sample:
                self.before_token(asked["request_id"], number)
            with self.lock:
                self.lock.wait_for(lambda: not self.alive or self.aborted & {name}, seconds / count)
                self.lock.wait_for(lambda: not self.paused or self.aborted & {"", name} or not self.alive)
                if self.aborted & {"", name} or not self.alive:
                    finish = "abort"
                    break
                logprobs = (self.logits(model, tokens)[-1] / sampling["temperature"]).log_softmax(-1)
                if not spans or spans[-1]["version"] != self.version:
                    spans.append({"version": self.version, "start": number, "end": 0})
            token = int((logprobs.numpy() + draw.gumbel(size=logprobs.numel())).argmax())
            top = logprobs.topk(min(logprobs.numel(), max(1, sampling["logprobs"])))
            content.append(
                {
                    "token_id": token,
                    "logprob": float(logprobs[token]),
                    "top_logprobs": [{"token_id": int(t), "logprob": float(p)} for p, t in zip(*top, strict=True)],
                }
            )
            tokens.append(token)
            if token in sampling.get("stop_token_ids", ()):
                finish = "stop"
                break
        if is_sample:
            self.note(f"answered {asked['request_id']} {finish}")
        told: dict[str, Any] = {
            "model": asked["model"],
            "choices": [
                {
                    "token_ids": tokens[prompt:],
                    "finish_reason": finish,
                    "weight_versions": spans,
                    "logprobs": {"content": content},
                }
            ],
        }
        if "prompt_logprobs" in sampling:
            told["prompt_logprobs"] = [None, *self.tops(model, tokens[:prompt], sampling["prompt_logprobs"])]
        return told

    def tops(self, model: Any, tokens: list[int], count: int) -> list[dict[str, Any]]:
        rows = self.logits(model, tokens)[:-1].log_softmax(-1).topk(count)
        return [
            {str(int(t)): {"logprob": float(p)} for p, t in zip(values, places, strict=True)}
            for values, places in zip(*rows, strict=True)
        ]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def serving(served: ServedModel) -> Iterator[str]:
    """Give the address of a server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def log_message(self, *_: object) -> None:
            return

        def _tell(self, status: int, told: Any) -> None:
            content = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:  # its name there
            adapters = [{"id": label, "parent": "policy"} for label in served.adapters]
            answers: dict[str, Any] = {
                "/v1/models": {"data": [{"id": "policy", "parent": None}, *adapters]},
                "/health": {},
                "/metrics": served.counters().encode() if self.path == "/metrics" else b"",
                "/openapi.json": {"paths": {route: {} for route in ROUTES if route != "/reset_prefix_cache"}},
            }
            told, known = answers.get(self.path, {}), self.path in answers and self.path not in served.refused
            status = 200 if known else 404
            self._tell(503 if served.busy(self.path) else status, served.answer(self.path, told))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            place = urlsplit(self.path)
            if place.path in served.refused:
                self._tell(404, {"detail": "Not Found"})
                return
            if served.busy(place.path):
                self._tell(503, {"detail": "Service Unavailable"})
                return
            asked = json.loads(body) if body else None
            if served.lost and place.path == "/collective_rpc" and asked["method"] == "holdfast_inspect":
                self._tell(500, {"error": {"message": "'CPUWorker' object has no attribute 'holdfast_inspect'"}})
                return
            if place.path == "/inference/v1/generate" and asked["model"] not in {"policy", *served.adapters}:
                self._tell(404, {"error": {"message": f"The model `{asked['model']}` does not exist."}})
                return
            if place.path == "/v1/load_lora_adapter" and served.has_name(asked["lora_name"]):
                said = f"The lora adapter '{asked['lora_name']}' has already been loaded."
                self._tell(400, {"error": {"message": said}})
                return
            told = served.post(place.path, parse_qs(place.query), asked)
            self._tell(200, served.answer(place.path, told))

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        with served.lock:
            served.alive = False
            served.lock.notify_all()
        server.shutdown()
        server.server_close()
        thread.join()


def served_tree(urls: list[str], directory: str, **sections: Any) -> dict[str, Any]:
    """Return a run of a small policy that these servers sample from; sections are merged over the defaults."""
    tree: dict[str, Any] = {
        "steps": 4,
        "run": {"dir": directory, "name": "r"},
        "model": {"config": MODEL, "tokenizer": "builtin:characters"},
        "data": {
            "synthetic": {"task": "sort", "rows": 200},
            "batch_size": 4,
            "max_length": 64,
            "max_prompt_length": 32,
        },
        "rollout": {
            "engine": {"kind": "vllm", "url": urls, "bucket_mib": 0.02, "attempts": 2},
            "group_size": 2,
            "max_new_tokens": 6,
            "show": 0,
        },
        "reward": {"kind": "path", "path": "reward.py:even"},
        "optim": {"lr": 3e-3, "schedule": "constant"},
        "launch": {"device": "cpu"},
        "checkpoint": {"rehearsal": False, "every_steps": 1, "export_at_end": False},
        "metrics": {"progress": "off"},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) else values
    return tree


AHEAD: dict[str, Any] = {"correction": {"kind": "truncate"}}
"""What `rollout.max_staleness: 1` asks for besides."""

REWARD = """
def even(completion_tokens, **_):
    return sum(token % 2 == 0 for token in completion_tokens) / len(completion_tokens)
"""
