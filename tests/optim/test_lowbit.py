"""AdamW with quantised moments: a first step is AdamW's, what is kept is within the table, and it gets there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.config.sections.optim import (
    AdamW4bitConfig,
    AdamW8bitConfig,
    AdamWFP8Config,
    OptimConfig,
)
from holdfast.training.setup.optimizers import build_optimizer
from tests.checkpoint.quantised import uncompiled

CONFIGS: dict[str, Any] = {"8bit": AdamW8bitConfig, "4bit": AdamW4bitConfig, "fp8": AdamWFP8Config}


def made(kind: str, weight: torch.nn.Parameter, **values: Any) -> torch.optim.Optimizer:
    config: OptimConfig = CONFIGS[kind](**values)
    return build_optimizer(config, {"weight": weight})


def numbers(moment: Tensor) -> np.ndarray[Any, Any]:
    return torch.empty(moment.shape).copy_(moment).double().numpy()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_first_step_is_adamw_s_and_its_moments_are_kept_within_the_table(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(64, 96, generator=generator) for _ in range(2))
    weight = torch.nn.Parameter(start.clone())
    weight.grad = gradient.clone()
    optimizer = made(kind, weight, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)

    optimizer.step()

    first, before = gradient.double().numpy(), start.double().numpy()
    mean, square = 0.1 * first, 0.01 * first**2
    expected = before * (1 - 0.01 * 0.1) - 0.01 * (mean / 0.1) / (np.sqrt(square / 0.01) + 1e-8)
    np.testing.assert_allclose(weight.detach().double().numpy(), expected, rtol=0, atol=1e-6)
    # Half the widest gap of each table, as a share of a block's largest number: 8 bits 0.1 / 14 / 2 and below, 4 bits
    # signed 0.225 / 2 and linear 1 / 16 / 2 (all but what lies below the smallest, 1 / 16); of fp8, whose
    # largest number is 448, 32 / 448 / 2.
    half = {"8bit": (0.008, 0.008), "4bit": (0.12, 0.0626), "fp8": (0.0358, 0.0358)}[kind]
    state = optimizer.state[weight]
    for moment, exact, bound in zip((state["exp_avg"], state["exp_avg_sq"]), (mean, square), half, strict=True):
        assert type(moment).__name__.startswith("OptimState")
        blocks = exact.reshape(-1, 128 if kind == "4bit" else 256)
        errors = np.abs(numbers(moment).reshape(blocks.shape) - blocks).max(-1) / np.abs(blocks).max(-1)
        assert 1e-4 < errors.max() <= bound


def torchaos_own(kind: str, weight: torch.nn.Parameter, **values: Any) -> torch.optim.Optimizer:
    from torchao import optim

    classes = {"8bit": optim.AdamW8bit, "4bit": optim.AdamW4bit, "fp8": optim.AdamWFp8}
    return classes[kind]([weight], **values)


@pytest.mark.parametrize("kind", CONFIGS)
def test_steps_are_those_of_torchao_s_own_optimizer(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(64, 64, generator=generator)
    gradients = torch.randn(12, 64, 64, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    values: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.01}
    pairs = [(ours, made(kind, ours, **values)), (theirs, torchaos_own(kind, theirs, **values))]

    with uncompiled():
        for weight, optimizer in pairs:
            for gradient in gradients:
                weight.grad = gradient.clone()
                optimizer.step()

    differences = (ours.detach() - theirs.detach()).abs()
    # Sums rounded otherwise may put a number that lies between two of the table on the other side.
    assert float((differences > 1e-5).float().mean()) < 0.002
    assert float((ours.detach() - start).abs().max()) > 0.05


@pytest.mark.parametrize(("kind", "bound"), [("8bit", 0.03), ("4bit", 0.3), ("fp8", 0.07)])
def test_quantised_moments_follow_adamw_on_a_regression(kind: str, bound: float) -> None:
    generator = torch.Generator().manual_seed(1)
    start, target = (torch.randn(64, 64, generator=generator) for _ in range(2))
    inputs = torch.randn(256, 64, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    values = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.01}
    pairs = [(ours, made(kind, ours, **values)), (theirs, torch.optim.AdamW([theirs], eps=1e-8, **values))]

    for weight, optimizer in pairs:
        for step in range(150):
            rows = inputs[step % 8 :: 8]
            optimizer.zero_grad()
            (rows @ (weight - target)).square().mean().backward()
            optimizer.step()

    way = float((theirs.detach() - start).norm())
    assert 0 < float((ours.detach() - theirs.detach()).norm()) <= bound * way
    assert way > 0.4 * float((target - start).norm())


def test_small_tensors_keep_their_moments_as_they_are() -> None:
    weight = torch.nn.Parameter(torch.ones(63, 64))
    weight.grad = torch.full_like(weight, 0.5)
    optimizer = made("8bit", weight, lr=0.1, betas=(0.9, 0.99))

    optimizer.step()

    assert type(optimizer.state[weight]["exp_avg"]) is Tensor
    assert float(optimizer.state[weight]["exp_avg"][0, 0]) == pytest.approx(0.05)


@pytest.mark.slow
def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    code = """
import sys
sys.modules["torchao"] = None
import torch
from holdfast.config.sections.optim import AdamW8bitConfig
from holdfast.errors import ConfigError
from holdfast.training.setup.optimizers import build_optimizer
try:
    build_optimizer(AdamW8bitConfig(), {"weight": torch.nn.Parameter(torch.ones(2))})
except ConfigError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout

    assert said.startswith("optim.kind: adamw_8bit needs torchao: pip install 'holdfast[lowbit]'")
