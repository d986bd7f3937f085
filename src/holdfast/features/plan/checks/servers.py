"""Looks whether servers that a run starts have a program, GPUs of their own, and memory for the weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from holdfast import registry
from holdfast.config.sections.engine import StartConfig, VLLMEngineConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ConfigError
from holdfast.features.plan.checks.findings import Finding, fail, ok
from holdfast.files import size_words

_DEFAULT_SHARE = 0.92
"""Share of a GPU's memory that vLLM 0.32 takes where it is told none."""


def look_at_servers(
    config: TrainingConfig, key: str, section: VLLMEngineConfig, weight_bytes: Callable[[], int | None]
) -> Finding:
    """Return whether servers can be started.

    Args:
        config: Of the run.
        key: Of the section.
        section: Says which servers.
        weight_bytes: Counts those of the model as it is exported; None where nobody knows.
    """
    if shutil.which(section.python) is None:
        return fail(
            "endpoints",
            f"{key}: {section.python} is no program here, and servers of vLLM are to be started with it",
            f"Install vLLM (tools/install_vllm.sh .venv-vllm), and name its Python in {key}.python.",
        )
    try:
        where = registry.load(registry.SERVER_DEVICES)(config, section)
    except ConfigError as error:
        return fail("endpoints", str(error), f"Mend {key}.start, rollout.engine.url or launch.ranks.")
    start = section.start or StartConfig()
    totals = _memory_of_gpus()
    needed = weight_bytes() if totals else None
    if needed is not None and (lacking := shortage(start, needed, totals)):
        return fail(
            "endpoints",
            f"{key}.start: {lacking}",
            f"Raise {key}.start.gpu_memory_utilization or {key}.start.tensor_parallel_size.",
        )
    return ok("endpoints", f"{key}: the run starts its {len(section.url)} servers itself, by {section.python}, {where}")


def shortage(start: StartConfig, weight_bytes: int, totals: Sequence[int]) -> str:
    """Return why the weights do not fit into a server's share of memory; "" where they do, or nobody knows.

    Quantised weights are smaller than those that are pushed, by how much is vLLM's affair: they are not looked at.

    Args:
        start: How servers are started.
        weight_bytes: Of the whole model.
        totals: Memory of each GPU, in bytes; at least one.
    """
    if "quantization" in start.flags():
        return ""
    share = start.gpu_memory_utilization or _DEFAULT_SHARE
    needed, smallest = weight_bytes / start.tensor_parallel_size, min(totals)
    if needed <= share * smallest:
        return ""
    told = f"gpu_memory_utilization: {share:g}" if start.gpu_memory_utilization else f"vLLM's share of {share:g}"
    return (
        f"weights take {size_words(round(needed))} of each GPU, and {told} leaves a server "
        f"{size_words(round(share * smallest))} of {size_words(smallest)}"
    )


def _memory_of_gpus() -> list[int]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [int(torch.cuda.mem_get_info(index)[1]) for index in range(torch.cuda.device_count())]
