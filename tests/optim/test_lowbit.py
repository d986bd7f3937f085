"""AdamW with quantised moments: a first step is AdamW's, what is kept is within the table, and it gets there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.config.sections.optim import AdamW8bitConfig
from holdfast.optim.lowbit import AdamW8bit, Moments, update_shard
from holdfast.parallel.apply import compiled
from holdfast.parallel.forms import Forms
from holdfast.training.setup.optimizers import build_optimizer
from holdfast.training.setup.updates import choose_update, difference
from tests.checkpoint.quantised import uncompiled


def made(weight: torch.nn.Parameter, **values: Any) -> AdamW8bit:
    optimizer = build_optimizer(AdamW8bitConfig(**values), {"weight": weight})
    assert isinstance(optimizer, AdamW8bit)
    return optimizer


def numbers(moment: Tensor) -> np.ndarray[Any, Any]:
    return torch.empty(moment.shape).copy_(moment).double().numpy()


def test_a_first_step_is_adamw_s_and_its_moments_are_kept_within_the_table() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(64, 96, generator=generator) for _ in range(2))
    weight = torch.nn.Parameter(start.clone())
    weight.grad = gradient.clone()
    optimizer = made(weight, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)

    optimizer.step()

    first, before = gradient.double().numpy(), start.double().numpy()
    mean, square = 0.1 * first, 0.01 * first**2
    expected = before * (1 - 0.01 * 0.1) - 0.01 * (mean / 0.1) / (np.sqrt(square / 0.01) + 1e-8)
    np.testing.assert_allclose(weight.detach().double().numpy(), expected, rtol=0, atol=1e-6)
    state = optimizer.state[weight]
    for moment, exact in ((state["exp_avg"], mean), (state["exp_avg_sq"], square)):
        assert type(moment).__name__ == "OptimState8bit"
        blocks = exact.reshape(-1, 256)
        errors = np.abs(numbers(moment).reshape(blocks.shape) - blocks).max(-1) / np.abs(blocks).max(-1)
        # Half the widest gap of the table, as a share of a block's largest number: 0.1 / 14 / 2 and below.
        assert 1e-4 < errors.max() <= 0.008


def test_steps_are_those_of_torchao_s_own_optimizer() -> None:
    from torchao.optim import AdamW8bit as TorchaosOwn

    generator = torch.Generator().manual_seed(2)
    start = torch.randn(64, 64, generator=generator)
    gradients = torch.randn(12, 64, 64, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    values: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.01}
    pairs = [(ours, made(ours, **values)), (theirs, TorchaosOwn([theirs], **values))]

    with uncompiled():
        for weight, optimizer in pairs:
            for gradient in gradients:
                weight.grad = gradient.clone()
                optimizer.step()

    differences = (ours.detach() - theirs.detach()).abs()
    # Sums rounded otherwise may put a number that lies between two of the table on the other side.
    assert float((differences > 1e-5).float().mean()) < 0.002
    assert float((ours.detach() - start).abs().max()) > 0.05


def test_quantised_moments_follow_adamw_on_a_regression() -> None:
    generator = torch.Generator().manual_seed(1)
    start, target = (torch.randn(64, 64, generator=generator) for _ in range(2))
    inputs = torch.randn(256, 64, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    values: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.01}
    pairs = [(ours, made(ours, **values)), (theirs, torch.optim.AdamW([theirs], eps=1e-8, **values))]

    for weight, optimizer in pairs:
        for step in range(150):
            rows = inputs[step % 8 :: 8]
            optimizer.zero_grad()
            (rows @ (weight - target)).square().mean().backward()
            optimizer.step()

    way = float((theirs.detach() - start).norm())
    assert 0 < float((ours.detach() - theirs.detach()).norm()) <= 0.03 * way
    assert way > 0.4 * float((target - start).norm())


def test_small_tensors_keep_their_moments_as_they_are() -> None:
    weight = torch.nn.Parameter(torch.ones(63, 64))
    weight.grad = torch.full_like(weight, 0.5)
    optimizer = made(weight, lr=0.1, betas=(0.9, 0.99))

    optimizer.step()

    assert type(optimizer.state[weight]["exp_avg"]) is Tensor
    assert float(optimizer.state[weight]["exp_avg"][0, 0]) == pytest.approx(0.05)


def without_correction(
    weight: Tensor, gradient: Tensor, moments: Moments, factors: tuple[Tensor, ...], betas: Any, eps: float
) -> None:
    update_shard(weight, gradient, moments, (*factors[:2], torch.ones(())), betas, eps)


def of_other_moments(
    weight: Tensor, gradient: Tensor, moments: Moments, factors: tuple[Tensor, ...], betas: Any, eps: float
) -> None:
    update_shard(weight, gradient, moments, factors, betas, eps)
    moments[1].mul_(1.01) if type(moments[1]) is Tensor else moments[1].copy_(moments[1].dequantize() * 1.02)


def failing(*_: Any) -> None:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (without_correction, "of the weights of [64, 96] differ"),
        (of_other_moments, "of the second moments of [64, 96] differ"),
        (failing, "no compiler here"),
    ],
)
def test_updates_that_differ_or_fail_are_not_used_whatever_was_asked_for(form: Any, said: str) -> None:
    optimizer, forms = made(torch.nn.Parameter(torch.ones(64, 96))), Forms()

    line = choose_update(forms, optimizer, form, AdamW8bitConfig(compile=True))

    assert said in line
    assert forms.record == {"updates": 0}
    assert optimizer.form is update_shard


def same_numbers(
    weight: Tensor, gradient: Tensor, moments: Moments, factors: tuple[Tensor, ...], betas: Any, eps: float
) -> None:
    update_shard(weight, gradient, moments, factors, betas, eps)


@pytest.mark.parametrize(("recorded", "form"), [(0, update_shard), (1, same_numbers)])
def test_a_resumed_run_updates_as_it_began_whichever_form_is_faster_now(recorded: int, form: Any) -> None:
    optimizer, forms = made(torch.nn.Parameter(torch.ones(64, 96))), Forms(timed=True)
    choose_update(forms, optimizer, same_numbers, AdamW8bitConfig())

    forms.resume({"updates": recorded})

    assert forms.record == {"updates": recorded}
    assert optimizer.form is form


def test_a_trial_of_updates_leaves_the_optimizer_as_it_was() -> None:
    weight = torch.nn.Parameter(torch.ones(64, 96))
    optimizer = made(weight)

    assert difference(optimizer, same_numbers) == ""

    assert not optimizer.state
    assert weight.grad is None
    assert torch.equal(weight.detach(), torch.ones(64, 96))


@pytest.mark.slow
def test_compiled_updates_give_the_numbers_of_updates_that_are_not_compiled() -> None:
    optimizer = made(torch.nn.Parameter(torch.ones(64, 96)))

    assert difference(optimizer, compiled(update_shard)) == ""


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
