"""Pushes weights by NCCL, through vLLM's own transfer factory (`rollout.engine.transport: nccl`).

Never run (docs/status.md). The transport is vLLM's; ours are the source of tensors and the client, since vLLM's
own trainer half never pauses, stamps a version or resets a cache, and speaks to one server. It needs vLLM where rank 0
runs (constraints-vllm.txt). Hashes of bytes are not compared on this way; the proof behind a push is the same.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from holdfast.errors import ConfigError, RunStopped
from holdfast.features.vllm.servers import VLLMServer
from holdfast.http import EndpointRefuses, EndpointUnwell
from holdfast.models.files.conversion import Header
from holdfast.parallel.mesh import World


def refuse_nccl(world: World) -> None:
    """Refuse NCCL where it cannot be, on this rank.

    Raises:
        ConfigError: There is no GPU, or no vLLM.
    """
    if world.device.type != "cuda":
        raise ConfigError(
            "rollout.engine.transport: nccl moves weights from GPU to GPU, and the ranks of this run compute on "
            f"{world.device.type}. Use transport: files, which goes through rollout.engine.folder."
        )
    if world.is_first and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine.transport: nccl goes through vLLM's own transfer, and vLLM is not installed where rank 0 "
            "runs. Install it there (pip install -c constraints-vllm.txt vllm), or use transport: files."
        )


class NCCLPublisher:
    """One group of rank 0 and the workers of all servers; it is made anew when a server was started again."""

    def __init__(self) -> None:
        self._group: tuple[str, ...] = ()
        self._engine: Any = None
        self._tensors: Iterator[tuple[str, Tensor]] = iter(())

    def push(
        self,
        servers: Sequence[tuple[VLLMServer, str, int]],
        tensors: Iterator[tuple[str, Tensor]],
        headers: Mapping[str, Header],
        label: str,
        *,
        keep: bool,
    ) -> None:
        """Push to all servers, on rank 0.

        Args:
            servers: Each with the identity of its process, and how many workers it has.
            tensors: Whole ones on the GPU, in the order of `headers`.
            headers: Of all of them.
            label: Name of these weights, stamped last.
            keep: Let completions that are on their way go on.

        Raises:
            RunStopped: A server refuses, or dies: a group of NCCL does not outlive a member.
        """
        client = _Client([server for server, _, _ in servers], [workers for _, _, workers in servers], label)
        try:
            client.each("/pause", None, mode="keep" if keep else "abort", clear_cache="true")
            group = tuple(identity for _, identity, _ in servers)
            if group != self._group:
                self._engine, self._group = _engine(client, lambda: self._tensors, headers), group
            self._engine.client, self._tensors = client, tensors
            self._engine.send_weights()
            client.each("/reset_prefix_cache", None, reset_running_requests="true")
            client.each("/resume", None)
        except (EndpointRefuses, EndpointUnwell, OSError, RuntimeError, ValueError) as error:
            raise RunStopped(
                f"Weights could not be pushed by NCCL ({error}). No sample of them was trained on. Start the servers "
                "again; the same command goes on from the last checkpoint."
            ) from error


def _engine(client: _Client, tensors: Callable[[], Iterator[tuple[str, Tensor]]], headers: Mapping[str, Header]) -> Any:
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    class Source(WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, header.dtype, tuple(header.shape)) for name, header in headers.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return tensors()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    size = 1 + sum(client.workers)
    info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=port, world_size=size)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source())


class _Client:
    """Behind vLLM's `VLLMWeightSyncClient`, for all servers together."""

    def __init__(self, servers: Sequence[VLLMServer], workers: Sequence[int], label: str) -> None:
        self._servers, self.workers, self._label = servers, workers, label

    def each(self, path: str, content: Any, **query: str) -> None:
        """Ask all servers side by side, since they wait for each other."""
        self._together(path, [content] * len(self._servers), **query)

    def _together(self, path: str, contents: Sequence[Any], **query: str) -> None:
        with ThreadPoolExecutor(len(self._servers)) as threads:
            waiting = [
                threads.submit(server.post, path, content, **query)
                for server, content in zip(self._servers, contents, strict=True)
            ]
            for future in waiting:
                future.result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Give every server's workers ranks of their own, behind ours."""
        offsets = [1 + sum(self.workers[:number]) for number in range(len(self._servers))]
        contents = [{"init_info": {**init_info, "rank_offset": offset}} for offset in offsets]
        self._together("/init_weight_transfer_engine", contents)

    def start_weight_update(self) -> None:
        """Begin."""
        self.each("/start_weight_update", None)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the workers receive."""
        self.each("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002 - vLLM's own gives none
        """End, and stamp the name of the weights."""
        self.each("/finish_weight_update", {"weight_version": self._label})
