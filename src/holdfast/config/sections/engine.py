"""What samples in a rollout: this process, servers of vLLM, or an engine of the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from holdfast.config.base import (
    Count,
    EvaluatedKwargs,
    FunctionPath,
    Mistake,
    OneOrSeveral,
    OnOrSection,
    Positive,
    PositiveInt,
    PublicStr,
    Section,
)
from holdfast.config.sections.server import EndpointConfig, endpoint_mistakes

LocalKind = Literal["auto", "inprocess", "transformers"]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LocalEngineConfig(Section):
    """Sampling in the ranks' own processes.

    `inprocess` decodes over the training weights; `transformers` calls `generate`, slower and for any architecture;
    `auto` takes the first where the model's attention allows it.
    """

    kind: LocalKind = "auto"


class UserEngineConfig(Section):
    """An engine of the user's own: a function that takes the keywords of `kwargs` and returns a `RolloutEngine`."""

    kind: Literal["path"] = "path"
    path: FunctionPath
    kwargs: EvaluatedKwargs = Field(default_factory=dict)
    """Arguments of the function, by name."""


class RecordedEngineConfig(Section):
    """What an earlier run sampled and kept (`rollout.record`), in the place of sampling."""

    kind: Literal["recorded"] = "recorded"
    path: PublicStr
    """Directory of the recorded run."""


_OURS = frozenset({
    "api-key", "dtype", "enable-lora", "enable-scale-out", "enable-sleep-mode", "generation-config",
    "gpu-memory-utilization", "hf-overrides", "host", "load-format", "logprobs-mode", "max-cpu-loras", "max-lora-rank",
    "max-loras", "max-model-len", "model", "port", "served-model-name", "tensor-parallel-size",
    "weight-transfer-config", "worker-extension-cls",
})  # fmt: skip
"""Flags of vLLM that follow from the run; the three with keys of their own among them."""


class StartConfig(Section):
    """How servers of vLLM are started: one at each address, ended with the run."""

    tensor_parallel_size: PositiveInt = 1
    """GPUs that share the model of one server."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory that a server takes; default: vLLM's."""
    devices: list[Count] = Field(default_factory=list)
    """GPUs of the servers, as this command sees them: the first `tensor_parallel_size` are the first server's; default:
    those behind the ranks'."""
    share: bool = False
    """Let servers use the GPUs of the ranks: they sleep while the policy is updated, and wake for the next push."""
    max_model_len: PositiveInt | None = None
    """Tokens of a server's context; default: the longest that the run needs."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Other flags of vLLM without their dashes, as in {enable-prefix-caching: true, quantization: fp8}; false stands
    for --no-FLAG, and a mapping is written as JSON."""

    def flags(self) -> dict[str, Any]:
        """Return `arguments` with dashes between words."""
        return {name.replace("_", "-"): value for name, value in self.arguments.items()}

    def mistakes(self) -> Iterator[Mistake]:
        """Yield devices that come twice, and flags that follow from the run."""
        yield from super().mistakes()
        if len(set(self.devices)) < len(self.devices):
            yield "devices", "a GPU comes twice; name every GPU once"
        for name in self.flags():
            if name.startswith("-"):
                yield "arguments", f"{name}: write it without its dashes, as in {name.lstrip('-')}"
            elif name == "pipeline-parallel-size":
                yield "arguments", f"{name}: GPUs are counted by tensor_parallel_size; use that"
            elif name in _OURS:
                yield "arguments", f"{name}: this flag follows from the run or has a key of its own; leave it out"


class VLLMEngineConfig(EndpointConfig):
    """Servers of vLLM over HTTP. Weights are pushed to all of them before a rollout, and every push is verified."""

    removed: ClassVar[Mapping[str, str]] = {
        "transport": "weights travel by files in rollout.engine.folder, which lies in memory by default; leave it out"
    }

    kind: Literal["vllm"] = "vllm"
    url: Annotated[list[PublicStr], Field(min_length=1), OneOrSeveral()]
    """One address or several, without a version, as in http://127.0.0.1:8700."""
    version: PublicStr = "0.32"
    """Beginning of the version of vLLM that servers are expected to have; of another one the run lists the routes that
    it looked for, and goes on."""
    start: Annotated[StartConfig | None, OnOrSection()] = None
    """Start a server at each address beside the ranks, as `holdfast serve` does, and end it with them; `true` starts
    them by the defaults."""
    python: PublicStr = "python"
    """The Python in whose environment vLLM is installed, for servers that we start."""
    open_to_network: bool = False
    """Let servers that we start listen at an address that other machines reach. Their routes take weights and requests
    from whoever reaches them.
    """
    timeout_seconds: Positive = 600.0
    """Longest wait for one whole answer."""
    requests: PositiveInt = 64
    """Most requests of one rank at a time."""
    interrupt: Literal["continue", "abandon"] = "continue"
    """What becomes of completions that are on their way when weights are pushed, as `rollout.max_staleness` has them:
    they go on with the new weights, and each token keeps which ones it is of; or they are abandoned, and sampled again
    as a whole. Where adapters are pushed, completions that go on keep theirs."""
    push: Literal["auto", "adapters", "weights"] = "weights"
    """What a push sends of a policy with LoRA: `adapters` alone, beside a base that each server gets once; `weights`:
    all of them, adapters merged. `auto`: adapters, where vLLM can load them and the servers take some."""
    folder: PublicStr = "/dev/shm"  # noqa: S108 - memory, and files with names that nobody can guess
    """Directory in which buckets of weights are written for the servers; they must see it under the same path."""
    bucket_mib: Positive = 256.0
    """Size of a bucket; a larger tensor has one of its own."""
    prove: Annotated[int, Field(ge=1)] | Literal["every_push", "start"] = "every_push"
    """After which pushes log-probabilities of fixed sequences are compared, engine against trainer, on every server:
    each, every so many, or at a start alone: that of the step walked before step 1, and that of the weights which the
    run begins or goes on with. What a server gets that was started again is proved too. Hashes of all bytes are
    compared at every push."""
    tolerance: Positive | None = None
    """Largest difference of a log-probability in nats, in bfloat16 of their mean; default: a small multiple of what
    rounding changes in the trainer's own, measured where a server differs by more than 1e-4, in bfloat16 by 0.02."""

    @property
    def shares_gpus(self) -> bool:
        """Whether the servers use the GPUs of the ranks, and sleep while the policy is updated."""
        return self.start is not None and self.start.share

    def mistakes(self) -> Iterator[Mistake]:
        """Yield addresses that are none, come twice, or that nobody should listen at."""
        yield from super().mistakes()
        for url in self.url:
            mistakes = [*endpoint_mistakes(url, self.api_key_variable)]
            yield from mistakes
            path = "" if mistakes else urlsplit(url).path.strip("/")
            if path:
                yield "url", f"{url}: its routes stand beside /v1; leave /{path} out"
        if len({url.rstrip("/") for url in self.url}) < len(self.url):
            yield "url", "an address comes twice; name every server once"
        if self.start is not None:
            yield from self._start_mistakes(self.start)

    def _start_mistakes(self, start: StartConfig) -> Iterator[Mistake]:
        if "quantization" in start.flags() and self.tolerance is None:
            yield (
                "tolerance",
                "quantised weights differ from the trainer's by more than rounding, which is all that a proof allows; "
                "set the largest difference in nats that you accept",
            )
        hosts = [] if self.open_to_network else [urlsplit(url).hostname for url in self.url]
        for host in hosts:
            if host not in LOOPBACK:
                yield (
                    "url",
                    f"a server that we start listens on this machine alone, and {host} is another address; use "
                    "127.0.0.1, or set rollout.engine.open_to_network",
                )
        if any(_port(url) is None for url in self.url):
            yield "url", "name the port of every server that is to be started, as in http://127.0.0.1:8700"


def _port(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:
        return None
