"""Tokens per second, and the share of the hardware's peak that they use."""

from __future__ import annotations

from dataclasses import dataclass

PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
    "A10": 125e12,
}
"""Dense bfloat16 peaks of the makers' data sheets, by a word in the device's name."""


@dataclass(frozen=True)
class ModelCost:
    """The size of a model, from which the floating-point operations of a token follow."""

    trained_parameters: float
    """Trained parameters that a token uses; of experts, only those it is sent to."""
    frozen_parameters: float
    """Frozen parameters through which gradients may flow; an upper bound."""
    layers: int
    hidden_size: int

    def flops(self, tokens: float, mean_length: float) -> float:
        """Return floating-point operations of a forward and backward pass over `tokens` tokens.

        6 per trained and 4 per frozen parameter (no weight gradient), and 6 x layers x hidden x length for causal
        attention (PaLM, arXiv:2204.02311, appendix B, halved for the causal mask). Recomputation does not count.
        """
        dense = 6 * self.trained_parameters + 4 * self.frozen_parameters
        return tokens * (dense + 6 * self.layers * self.hidden_size * mean_length)


def peak_flops(device_name: str) -> float | None:
    """Return a device's peak, or None for one we do not know."""
    return next((peak for model_name, peak in PEAK_FLOPS.items() if model_name in device_name), None)
