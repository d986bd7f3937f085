"""Pushes adapters alone to vLLM servers: two small files, loaded under a name that is never used again.

A server gets the frozen base once. An adapter is then written once for all servers, each of which returns the hashes
of the files that it sees; it is loaded beside those that completions may still use, and unloaded when none may. The
files stay until then, since a server that evicts an adapter reads them again; they are removed just before the adapter
is unloaded.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from holdfast.config.sections.model import LoRAConfig
from holdfast.errors import RunStopped
from holdfast.features.vllm.servers import VLLMServer
from holdfast.http import EndpointRefuses, EndpointUnwell
from holdfast.models.adapters.files import PEFT_PREFIX, SETTINGS, WEIGHTS, names_in_file, peft_settings
from holdfast.models.adapters.live import adapters_of
from holdfast.models.files.conversion import Header, renamed
from holdfast.models.files.safetensors_files import tensor_bytes, write_file
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import converted_tensors
from holdfast.training.run import Model

_MIB = 2**20


def adapter_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the factors under peft's names on rank 0, in the compute dtype; elsewhere send their shards."""
    headers = adapter_headers(model)
    plan = renamed({name: name.removeprefix(PEFT_PREFIX) for name in headers}, headers)
    dtype, ranks = getattr(torch, model.plan.compute_dtype), model.run.ranks
    parameters = sharded_parameters(model.module)
    with converted_tensors(parameters.__getitem__, plan, dtype, ranks) as tensors:
        for name, pieces in tensors:
            yield name, torch.cat([piece.cpu() for piece in pieces])


def adapter_headers(model: Model) -> dict[str, Header]:
    """Return the shapes and dtypes of what `adapter_tensors` yields, in its order."""
    parameters, dtype = sharded_parameters(model.module), getattr(torch, model.plan.compute_dtype)
    return {PEFT_PREFIX + name: Header(tuple(parameters[name].shape), dtype) for name in names_in_file(model.module)}


def adapter_settings(model: Model, lora: LoRAConfig) -> str:
    """Return adapter_config.json, which holds ranks and scale."""
    return peft_settings(adapters_of(model.module), lora, model.run.config.model.path or "", scorer=False)


@dataclass
class _LoadedAdapter:
    order: int
    """Of its push."""
    directory: Path
    urls: set[str] = field(default_factory=set)
    """Addresses of the servers that loaded it."""


@dataclass
class AdapterPublisher:
    """Loads adapters into servers from one process of a run, and unloads them."""

    folder: Path
    """Folder in which adapters are written; every server sees it under this name."""
    _loaded: dict[str, _LoadedAdapter] = field(default_factory=dict)
    """By name."""

    def push(  # noqa: PLR0913 - an adapter, its name, and who takes it
        self,
        servers: Sequence[VLLMServer],
        tensors: Iterator[tuple[str, Tensor]],
        headers: Mapping[str, Header],
        settings: str,
        label: str,
        order: int,
    ) -> dict[str, str]:
        """Load an adapter into all servers, and return those that were found dead, by address, with what was seen.

        Args:
            servers: Well a moment ago, with the base.
            tensors: Of the adapter, on the CPU.
            headers: Of all of them, in their order.
            settings: Its adapter_config.json.
            label: Its name, which no other adapter has had.
            order: Number of the push.

        Raises:
            RunStopped: A server refuses the adapter, or sees other files than were written.
        """
        adapter = _LoadedAdapter(order, self.folder / f"holdfast-{secrets.token_hex(8)}")
        self._loaded[label] = adapter
        digests = self._write(adapter.directory, tensors, headers, settings)
        with ThreadPoolExecutor(max(1, len(servers))) as threads:
            results = list(threads.map(lambda server: _load(server, label, adapter.directory, digests), servers))
        adapter.urls |= {server.url for server, why in zip(servers, results, strict=True) if why is None}
        dead = {}
        for server, why in zip(servers, results, strict=True):
            if why is None:
                continue
            if server.is_well():
                raise RunStopped(
                    f"The server at {server.url} refuses the adapter that was pushed to it: it {why}. No sample of it "
                    "was trained on. The same command goes on from the last checkpoint; rollout.engine.push: weights "
                    "pushes whole weights instead."
                )
            dead[server.url] = why
        return dead

    def unload(self, servers: Sequence[VLLMServer], oldest: int) -> None:
        """Unload adapters that were pushed before the push number `oldest`, and remove their files.

        Raises:
            RunStopped: A server keeps one, so that its adapters would grow in number.
        """
        of_url = {server.url: server for server in servers}
        for label in [label for label, adapter in self._loaded.items() if adapter.order < oldest]:
            adapter = self._loaded.pop(label)
            shutil.rmtree(adapter.directory, ignore_errors=True)
            for url in adapter.urls & of_url.keys():
                try:
                    of_url[url].unload_adapter(label)
                except EndpointUnwell:
                    continue  # the next push sees that it died
                except EndpointRefuses as error:
                    if of_url[url].has_adapter(label):
                        raise RunStopped(
                            f"The server at {url} does not unload an adapter that no completion uses: it {error}. "
                            "Start it again; the same command goes on from the last checkpoint."
                        ) from error

    def close(self, servers: Sequence[VLLMServer]) -> None:
        """Unload all adapters, as far as servers live."""
        with suppress(RunStopped):
            self.unload(servers, max([adapter.order for adapter in self._loaded.values()], default=0) + 1)

    def _write(
        self, directory: Path, tensors: Iterator[tuple[str, Tensor]], headers: Mapping[str, Header], settings: str
    ) -> dict[str, str]:
        """Write an adapter, and return the hashes of its files."""
        try:
            directory.mkdir()
            (directory / SETTINGS).write_text(settings, encoding="utf-8")
            with (directory / WEIGHTS).open("xb") as file:
                write_file(file, headers, ((name, iter([tensor])) for name, tensor in tensors))
            return {name: file_digest(directory / name) for name in (SETTINGS, WEIGHTS)}
        except OSError as error:
            raise RunStopped(
                f"An adapter of {sum(map(tensor_bytes, headers.values())) / _MIB:.0f} MiB could not be written to "
                f"{directory.parent} ({error}). Make room there, or name another rollout.engine.folder."
            ) from error


def file_digest(path: Path) -> str:
    """Return the hash of a file's bytes, as a server makes it."""
    return str(xxhash.xxh3_128_hexdigest(path.read_bytes()))


def _load(server: VLLMServer, label: str, directory: Path, digests: Mapping[str, str]) -> str | None:
    """Load an adapter into a server; return what went wrong, None if nothing did."""
    try:
        for seen in server.file_digests(directory, list(digests)):
            for name, digest in digests.items():
                if seen.get(name) != digest:
                    return f"sees other bytes of {directory / name} than were written (rollout.engine.folder)"
        server.load_adapter(label, directory)
    except (EndpointRefuses, EndpointUnwell) as error:
        return str(error)
    return None
