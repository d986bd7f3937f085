"""Chooses the GPUs of the servers that a run starts; refuses those of the ranks, and more than there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.config.sections.engine import StartConfig, VLLMEngineConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ConfigError
from holdfast.launch.environment import computes_on_cpu, cuda_devices, resolve_ranks

_KEY = "rollout.engine.start"


def gpus_of_servers(
    config: TrainingConfig, section: VLLMEngineConfig, environ: Mapping[str, str] | None = None
) -> list[list[int]]:
    """Return the GPUs of each server, numbered as this command sees them; none for each on the CPU.

    Raises:
        ConfigError: They are too few or too many, are not there, or are the ranks' own.
    """
    start = section.start or StartConfig()
    if computes_on_cpu(config.launch, environ):
        if start.devices:
            raise ConfigError(f"{_KEY}.devices: this run computes on the CPU, and so do its servers. Leave it out.")
        return [[] for _ in section.url]
    count, ranks = cuda_devices(environ), resolve_ranks(config.launch, environ)
    size, first = start.tensor_parallel_size, 0 if start.share else ranks
    needed = len(section.url) * size
    servers = f"{len(section.url)} servers of {size} GPUs each need {needed}"
    if not start.devices and first + needed > count:
        raise ConfigError(
            f"{_KEY}: {servers}, the ranks take {ranks}, and this command sees {count}. Set launch.ranks to fewer, "
            f"name fewer addresses in rollout.engine.url, or set {_KEY}.share: true."
        )
    if start.devices and len(start.devices) != needed:
        raise ConfigError(f"{_KEY}.devices: {servers}, and {len(start.devices)} are named. Name one for each.")
    placed = planned_gpus(section, ranks)
    _refuse_gpus([device for devices in placed for device in devices], count, first)
    return placed


def planned_gpus(section: VLLMEngineConfig, ranks: int) -> list[list[int]]:
    """Return the GPUs of each server on a machine that has enough: those named, or those behind the ranks'."""
    start = section.start or StartConfig()
    size, first = start.tensor_parallel_size, 0 if start.share else ranks
    devices = start.devices or list(range(first, first + len(section.url) * size))
    return [devices[number * size : (number + 1) * size] for number in range(len(section.url))]


def _refuse_gpus(devices: Sequence[int], count: int, ranks: int) -> None:
    """Refuse GPUs that are not there, or that are one of the first, which ranks have.

    Raises:
        ConfigError: One is.
    """
    for device in devices:
        if device >= count:
            raise ConfigError(
                f"{_KEY}.devices: there is no GPU {device}; this command sees {count}, numbered from 0. Name others, "
                "or set CUDA_VISIBLE_DEVICES to show more."
            )
        if device < ranks:
            raise ConfigError(
                f"{_KEY}.devices: GPU {device} is a rank's: the {ranks} ranks have GPUs 0 to {ranks - 1}. Name others, "
                f"or set {_KEY}.share: true, which has servers sleep while the policy is updated."
            )
