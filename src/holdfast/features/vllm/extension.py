"""The receiving end of a push of weights: runs inside vLLM's own processes, and never in ours.

`holdfast serve` lays a copy of this file where vLLM's workers find it (`--worker-extension-cls`), so it imports what is
there, and nothing of Holdfast. Importing it registers the transfer backend `holdfast`.

A push is a session: init names every tensor, its shape and its dtype; buckets follow as safetensors files that both
sides see; the last one says so. A tensor that is unknown, comes twice, has another shape, dtype or hash, or never comes
ends the push with its name. Completeness is judged with the last bucket, not at the end of the session: vLLM 0.32
ends a session when a bucket is refused, and never when its end is.
"""

from __future__ import annotations

import functools
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
import xxhash
from safetensors import safe_open
from tokenizers import Tokenizer
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "holdfast"
PROBE = "Sort 3 1 2: a's naïve  «x²» → \u65e5\u672c 10,000\n"
"""The trainer cuts the same text (`features/vllm/servers.py`)."""
_IDENTITY = uuid.uuid4().hex
"""Of this process: a server that was started again has another one."""


@dataclass
class Init(WeightTransferInitInfo):  # type: ignore[misc]
    """Names, shapes and dtypes of the tensors of all pushes."""

    shapes: dict[str, list[int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket."""

    file: str = ""
    hashes: dict[str, str] = field(default_factory=dict)
    """XXH3 of the bytes of each tensor, in hexadecimal."""
    last: bool = False


class Buckets(WeightTransferEngine):  # type: ignore[misc]
    """The receiving engine: it reads whole tensors from buckets and passes them to the model's loader."""

    init_info_cls, update_info_cls = Init, Update
    declared: Init | None = None
    received: frozenset[str] = frozenset()
    is_open = False

    def init_transfer_engine(self, init_info: Init) -> None:
        """Learn what every push from now on holds."""
        if has_experts(self.model) and self.device.type == "cpu":
            raise ValueError(
                "this CPU build of vLLM serves experts wrongly after a push in place, the same weights included; "
                "sample with rollout.engine: auto, or serve on a GPU"
            )
        self.declared = init_info

    def start_weight_update(self) -> None:
        """Begin a push."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.declared is None:
            raise ValueError("a push began before init_weight_transfer_engine named its tensors")
        self.received, self.is_open = frozenset(), True
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        """Take a bucket, or refuse it whole."""
        try:
            tensors = self.tensors_of(update_info)
            self.check(tensors, update_info.hashes)
            self.received |= frozenset(tensors)
            self.load(tensors)
            if update_info.last:
                self.check_complete()
        except BaseException:
            self.close_session()  # or every layer that waits stays on the meta device
            raise

    def tensors_of(self, update_info: Update) -> dict[str, torch.Tensor]:
        """Read a bucket; cloned, since vLLM keeps what belongs to an unfinished layer beyond this call."""
        with safe_open(update_info.file, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping

    def check(self, tensors: Mapping[str, torch.Tensor], hashes: Mapping[str, str]) -> None:
        """Refuse what was not declared so, or did not arrive as it was sent."""
        assert self.declared is not None
        if absent := sorted(set(hashes) - set(tensors)):
            raise ValueError(f"{absent[0]} is not in the bucket that announced it")
        for name, tensor in tensors.items():
            shape, dtype = self.declared.shapes.get(name), self.declared.dtypes.get(name)
            if shape is None:
                raise ValueError(f"{name} is not of this model")
            if name in self.received:
                raise ValueError(f"{name} was sent twice")
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, expected {shape}")
            if str(tensor.dtype) != dtype:
                raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}")
            if digest(tensor) != hashes.get(name):
                raise ValueError(f"{name} arrived with other bytes than were sent (hash {digest(tensor)[:12]})")

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hand checked tensors to the model."""
        self.model.load_weights(list(tensors.items()))

    def check_complete(self) -> None:
        """Refuse a push that lacks a tensor."""
        assert self.declared is not None
        names = self.declared.shapes
        if missing := sorted(set(names) - self.received):
            raise ValueError(f"{len(missing)} of {len(names)} tensors were not sent, the first: {missing[0]}")

    def finish_weight_update(self) -> None:
        """End a push."""
        self.close_session()

    def close_session(self) -> None:
        """Let layers take their new values; those that came only in part hold garbage, and the push was refused."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self.is_open:
            finalize_layerwise_reload(self.model, self.model_config)
        self.is_open = False

    def shutdown(self) -> None:
        """Have nothing to give back."""


def digest(tensor: torch.Tensor) -> str:
    """Return the hash of a tensor's bytes."""
    data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(xxhash.xxh3_128_hexdigest(data))


def file_digest(file: Path) -> str:
    """Return the hash of a file's bytes."""
    return str(xxhash.xxh3_128_hexdigest(file.read_bytes()))


def has_experts(model: torch.nn.Module) -> bool:
    """Return whether a model as vLLM holds it is a mixture of experts."""
    return any("moe" in type(module).__name__.lower() for module in model.modules())


@functools.cache
def tokenizer_digest(directory: str) -> str | None:
    """Return a hash of the tokens and of how some text is cut into them; None without a tokenizer.json."""
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    probe = tokenizer.encode(PROBE, add_special_tokens=False).ids
    return xxhash.xxh3_128_hexdigest(json.dumps([sorted(tokenizer.get_vocab().items()), probe]).encode())


def template_digest(directory: str) -> str | None:
    """Return a hash of the chat template; None where it has none, or several."""
    file, settings = Path(directory) / "chat_template.jinja", Path(directory) / "tokenizer_config.json"
    setting = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    text = file.read_text(encoding="utf-8") if file.is_file() else setting
    return xxhash.xxh3_128_hexdigest(text.encode()) if isinstance(text, str) else None


PROBES = 4
"""Random vectors that a layer is asked about."""


def layer_of(model: torch.nn.Module, path: str) -> tuple[Any, int]:
    """Return the layer that has the matrix of a module's name, and its first row in there; None if no layer has it."""
    modules = dict(model.named_modules())
    if path in modules:
        return modules[path], 0
    parent, _, leaf = path.rpartition(".")
    for packed, leaves in getattr(model, "packed_modules_mapping", {}).items():
        module: Any = modules.get(f"{parent}.{packed}") if leaf in leaves else None
        if module is not None:
            return module, sum(list(module.output_sizes)[: leaves.index(leaf)])
    return None, 0


@torch.no_grad()
def difference(model: torch.nn.Module, name: str, sent: torch.Tensor, ranks: int) -> float | None:
    """Return how far what the model computes with is from a tensor that was sent, relative to it; None if none can say.

    A matrix is told by what its layer makes of random vectors: vLLM keeps packed copies, and its parameter may be the
    new one, the old one or empty meanwhile. A layer that holds several matrices is asked for the rows of this one.
    Where several ranks share a server's model, layers with matrices hold parts of them, cut in a way of each kind of
    layer, and cannot say.
    """
    path, _, kind = name.rpartition(".")
    module, start = layer_of(model, path)
    rows = slice(start, start + sent.shape[0])
    module = getattr(module, "base_layer", module)  # adapters wrap layers
    if module is None or (ranks > 1 and hasattr(module, "quant_method")):
        return None
    sent = sent.float()
    is_matrix = kind == "weight" and sent.ndim == 2 and type(module).__name__ != "VocabParallelEmbedding"
    if is_matrix and hasattr(module, "quant_method"):
        draw = torch.Generator().manual_seed(0)
        probe = torch.randn(PROBES, sent.shape[1], generator=draw)
        like = next(iter(model.parameters()))
        computed = module.quant_method.apply(module, probe.to(like.device, like.dtype), None)[:, rows].float().cpu()
        sent = probe @ sent.t()
    else:
        value = getattr(module, kind, None)
        if value is None or value.shape[0] < rows.stop:
            return None
        computed = value[rows].float().cpu()
    return float((computed - sent).abs().max() / sent.abs().max().clamp(min=1e-6))


@dataclass
class Lease:
    """The run that may push to this server, and the time until which it may."""

    holder: dict[str, Any] | None = None
    until: float = 0.0
    """Time on the monotonic clock at which the lease ends."""

    def living(self, clock: float) -> dict[str, Any] | None:
        """Return who has the server; None if nobody does, or has not renewed it in time."""
        return self.holder if clock < self.until else None

    def ask(self, holder: dict[str, Any], seconds: float, replaces: str | None, clock: float) -> dict[str, Any]:
        """Give the server to a run for some seconds, unless another one has it; return who has it, and how long.

        No seconds give it back. A run that saw another one die names the token that it replaces.
        """
        living = self.living(clock)
        if living is None or living["token"] in {holder["token"], replaces}:
            self.holder, self.until = holder, clock + seconds
        return {"holder": self.holder, "seconds": self.until - clock}


_LEASE = Lease()


class Extension:
    """Methods that vLLM adds to its workers, so that /collective_rpc can call them by name."""

    def holdfast_inspect(self, file: str) -> dict[str, float | None]:
        """Return the difference of every tensor of a bucket from what the model computes with."""
        worker: Any = self
        model = worker.model_runner.get_model()
        ranks = int(worker.model_runner.vllm_config.parallel_config.world_size)
        with safe_open(file, framework="pt") as bucket:
            return {name: difference(model, name, bucket.get_tensor(name), ranks) for name in bucket.keys()}  # noqa: SIM118

    def holdfast_digests(self, directory: str, names: list[str]) -> dict[str, str]:
        """Return the hashes of the files in a directory that this worker sees."""
        files = {name: Path(directory) / name for name in names}
        return {name: file_digest(file) for name, file in files.items() if file.is_file()}

    def holdfast_lease(self, holder: dict[str, Any], seconds: float, replaces: str | None = None) -> dict[str, Any]:
        """Let one run push to this server; return who may."""
        return _LEASE.ask(holder, seconds, replaces, time.monotonic())

    def holdfast_identity(self) -> dict[str, Any]:
        """Return what a trainer asks before its first push."""
        worker: Any = self
        config = worker.model_runner.vllm_config
        return {
            "identity": _IDENTITY,
            "holder": _LEASE.living(time.monotonic()),
            "backend": config.weight_transfer_config.backend if config.weight_transfer_config else None,
            "dtype": str(config.model_config.dtype),
            "longest": int(config.model_config.max_model_len),
            "vocabulary": int(config.model_config.get_vocab_size()),
            "logprobs": str(getattr(config.model_config.logprobs_mode, "value", config.model_config.logprobs_mode)),
            "tied": bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False)),
            "block": int(config.cache_config.block_size),
            "device": str(config.device_config.device_type),
            "experts": has_experts(worker.model_runner.get_model()),
            "workers": int(config.parallel_config.world_size),
            "adapter_rank": int(config.lora_config.max_lora_rank) if config.lora_config else None,
            "version": str(vllm.__version__),
            "tokenizer": tokenizer_digest(config.model_config.tokenizer),
            "template": template_digest(config.model_config.tokenizer),
        }


if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - registering twice is an error there
    WeightTransferEngineFactory.register_engine(BACKEND, Buckets)
