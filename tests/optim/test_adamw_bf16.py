"""AdamW on bfloat16 weights: the compensation keeps what rounding would lose."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.optim.lowbit import SPREAD, AdamWBF16, round_evenly


def gradients(steps: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) * 0.1 + 1.0 for _ in range(steps)]


def run(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter, steps: int) -> torch.Tensor:
    for gradient in gradients(steps, weight.numel()):
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    return weight.detach().float()


def test_small_steps_follow_float32_where_plain_bfloat16_does_not_move() -> None:
    exact, plain, compensated = (
        torch.nn.Parameter(torch.ones(64, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
    )

    wide = run(torch.optim.AdamW([exact], lr=1e-3, weight_decay=0.0), exact, 200)
    stuck = run(torch.optim.AdamW([plain], lr=1e-3, weight_decay=0.0), plain, 200)
    kept = run(AdamWBF16([compensated], lr=1e-3), compensated, 200)

    assert torch.equal(stuck, torch.ones(64))
    assert abs(float(wide.mean()) - 0.8) < 0.01
    np.testing.assert_allclose(kept.numpy(), wide.numpy(), atol=2**-8)  # one last digit of a bfloat16 below 1


def test_one_step_is_the_formula() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16))
    weight.grad = torch.tensor([0.25, -0.5, 1.0], dtype=torch.bfloat16)
    optimizer = AdamWBF16([weight], lr=0.125, betas=(0.5, 0.75), eps=0.0, weight_decay=0.5)

    optimizer.step()

    # One step of Adam moves by lr * sign(gradient), since both moments are corrected to the gradient itself.
    before = np.array([1.0, -2.0, 0.5])
    expected = before - 0.125 * np.sign([0.25, -0.5, 1.0]) - 0.125 * 0.5 * before
    state = optimizer.state[weight]
    total = weight.detach().double().numpy() + state["compensation"].double().numpy()
    np.testing.assert_allclose(total, expected, rtol=1e-3)
    assert state["exp_avg"].dtype == torch.bfloat16
    assert float(state["step"]) == 1.0


def test_weight_and_compensation_together_are_more_exact_than_the_weight_alone() -> None:
    exact = torch.nn.Parameter(torch.full((256,), 3.0))
    compensated = torch.nn.Parameter(torch.full((256,), 3.0, dtype=torch.bfloat16))
    betas = (0.5, 0.75)  # short memories, so that the moments' own rounding stays small beside the weight's
    optimizer = AdamWBF16([compensated], lr=1e-4, betas=betas)

    wide = run(torch.optim.AdamW([exact], lr=1e-4, betas=betas, weight_decay=0.0), exact, 100)
    rounded = run(optimizer, compensated, 100)

    together = rounded + optimizer.state[compensated]["compensation"].float()
    assert (together - wide).abs().max() < 0.1 * (rounded - wide).abs().max()


def test_moments_forget_as_those_in_float32_do() -> None:
    """At betas[1] = 0.999 a step takes 0.1 % of a second moment, and half a digit of bfloat16 is 0.2 % or more."""
    exact, kept = (torch.nn.Parameter(torch.ones(8, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    wide, narrow = torch.optim.AdamW([exact], lr=1e-5), AdamWBF16([kept], lr=1e-5)

    for step in range(4000):
        for weight in (exact, kept):
            weight.grad = torch.full_like(weight, 2.0**-7 if step < 1000 else -(2.0**-10))
        wide.step()
        narrow.step()
        if step % 500 == 499:
            for name in ("exp_avg", "exp_avg_sq"):
                mine, theirs = (optimizer.state_dict()["state"][0][name] for optimizer in (narrow, wide))
                np.testing.assert_allclose(mine.float().numpy(), theirs.numpy(), rtol=0.03)


def test_a_moment_is_rounded_up_as_often_as_what_is_cut_off_demands() -> None:
    """Between 1 and 1 + 2^-7 a quarter of the way, a quarter of all roundings go up; likewise below zero."""
    moment, exact = torch.zeros(2, dtype=torch.bfloat16), torch.tensor([1 + 2**-9, -(1 + 2**-9)])

    stored = []
    for step in range(1, 1001):
        round_evenly(moment, exact, step * SPREAD[0])
        stored.append(moment.float().clone())

    found = torch.stack(stored)
    assert set(found[:, 0].tolist()) == {1.0, 1 + 2**-7}
    np.testing.assert_allclose(found.mean(0).numpy(), exact.numpy(), atol=2**-7 * 5 / 1000)


def test_parameters_without_a_gradient_get_no_state() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = AdamWBF16([used, unused], lr=0.1)
    used.grad = torch.ones(2, dtype=torch.bfloat16)

    optimizer.step()

    assert unused not in optimizer.state
    assert torch.equal(unused.detach(), torch.ones(2, dtype=torch.bfloat16))
