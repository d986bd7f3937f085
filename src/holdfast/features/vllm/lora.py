"""Whether a run pushes its adapters alone, and what servers must be started with for that. No torch is imported."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.config.sections.model import LoRAConfig

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.32 accepts for --max-lora-rank."""
_SPARE = 2
"""Adapters besides those of older weights that completions may still use: the present one, and the next."""


class AdapterLimits(NamedTuple):
    """Limits of a server that takes adapters."""

    rank: int
    """Largest rank of an adapter."""
    adapters: int
    """Most adapters at a time."""

    def flags(self) -> dict[str, str]:
        """Return vLLM's flags with values; `--enable-lora` has none."""
        return {
            "--max-loras": str(self.adapters),
            "--max-cpu-loras": str(self.adapters + 1),  # an adapter that is still in use must not be evicted
            "--max-lora-rank": str(self.rank),
        }


def largest_rank(lora: LoRAConfig) -> int:
    """Return the largest rank of a run's adapters."""
    return max([lora.rank, *lora.ranks.values()])


def limits_of(lora: LoRAConfig, staleness: int) -> AdapterLimits:
    """Return the limits of the servers that are started for a run."""
    rank = largest_rank(lora)
    return AdapterLimits(next((size for size in _RANKS if size >= rank), rank), staleness + _SPARE)


def why_merged(lora: LoRAConfig | None) -> str:
    """Return why a run cannot push its adapters alone; "" where it can."""
    if lora is None:
        return "the policy has no adapters (model.lora)"
    reasons = {
        "vLLM 0.32 has no DoRA (model.lora.dora)": lora.dora,
        "vLLM is not given adapters of stacks of experts (model.lora.experts)": lora.experts != [],
        "parameters beside the adapters are trained (model.lora.train)": lora.train != [],
        f"vLLM 0.32 takes no rank above {_RANKS[-1]} (model.lora.rank)": largest_rank(lora) > _RANKS[-1],
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
