"""Steps in host memory: gradients leave when they are whole, and between updates nothing looks different."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.models.names import named_parameters
from holdfast.optim import host_steps
from holdfast.optim.host_steps import HostSteps
from holdfast.optim.state import collect
from holdfast.parallel.copies import attach_copies


class Model(nn.Module):
    """Two layers, and a third that some passes leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, rows: Tensor, *, whole: bool = True) -> Tensor:
        hidden: Tensor = self.second(self.first(rows.to(self.first.weight.dtype)).relu())
        return self.third(hidden) if whole else hidden


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def adamw(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [value]} for value in of.parameters()], lr=0.1, weight_decay=0.1, fused=True)


def rows(number: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(number))


def plain_updates(of: Model, optimizer: torch.optim.Optimizer, wholes: list[bool]) -> None:
    for update in range(3):
        for number, whole in enumerate(wholes):
            of(rows(10 * update + number), whole=whole).square().sum().backward()
        for value in of.parameters():
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad
        optimizer.step()
        optimizer.zero_grad()


def host_updates(of: Model, optimizer: torch.optim.Optimizer, steps: HostSteps, wholes: list[bool]) -> None:
    for update in range(3):
        for number, whole in enumerate(wholes):
            steps.start_micro_batch(first=number == 0, last=number == len(wholes) - 1)
            of(rows(10 * update + number), whole=whole).square().sum().backward()
        with steps.in_place(optimizer):
            twins = [value for group in optimizer.param_groups for value in group["params"]]
            assert not {id(value) for value in twins} & {id(value) for value in of.parameters()}
            for value in twins:
                value.grad = torch.zeros_like(value) if value.grad is None else value.grad
            optimizer.step()
            steps.write_back()


@pytest.mark.parametrize("copied", [False, True], ids=["", "copies in bfloat16"])
@pytest.mark.parametrize(
    "wholes",
    [[True], [True, True, True], [True, False], [False]],
    ids=["one micro-batch", "three", "a layer that the last leaves out", "a layer that all leave out"],
)
def test_updates_have_the_bits_of_an_optimizer_beside_the_parameters(wholes: list[bool], copied: bool) -> None:
    plain, hosted = model(), model()
    if copied:
        for each in (plain, hosted):
            attach_copies(each, torch.bfloat16, [tuple(named_parameters(each))], [])
    optimizers = adamw(plain), adamw(hosted)
    steps = HostSteps(optimizers[1])

    plain_updates(plain, optimizers[0], wholes)
    host_updates(hosted, optimizers[1], steps, wholes)

    one, two = (collect(optimizer, named_parameters(each)) for optimizer, each in zip(optimizers, (plain, hosted),
                                                                                      strict=True))  # fmt: skip
    assert all(torch.equal(value, other) for value, other in zip(plain.parameters(), hosted.parameters(), strict=True))
    assert list(one.tensors) == list(two.tensors)
    for name, state in one.tensors.items():
        assert all(torch.equal(value, two.tensors[name][key]) for key, value in state.items())


def test_gradients_leave_in_the_backward_pass_of_the_last_micro_batch_alone() -> None:
    hosted = model()
    steps = HostSteps(adamw(hosted))
    missing: list[Any] = []
    hosted.first.weight.register_hook(lambda _: missing.append([value.grad is None for value in hosted.parameters()]))

    for last in (False, True):
        steps.start_micro_batch(first=not last, last=last)
        hosted(rows(0)).sum().backward()
        missing.append([value.grad is None for value in hosted.parameters()])

    in_first, after_first, in_last, after_last = missing
    assert not any(after_first)
    assert all(after_last)
    assert in_last[2:] == [True] * 4, "those of the layers behind are gone while the first one is still to come"
    assert in_first[2:] == [False] * 4


def test_a_step_that_fails_leaves_the_optimizer_with_its_parameters() -> None:
    hosted = model()
    optimizer = adamw(hosted)
    before = copy.deepcopy(hosted.state_dict())
    steps = HostSteps(optimizer)

    with pytest.raises(ZeroDivisionError), steps.in_place(optimizer):
        raise ZeroDivisionError

    assert [value for group in optimizer.param_groups for value in group["params"]] == [*hosted.parameters()]
    assert all(torch.equal(value, before[name]) for name, value in hosted.state_dict().items())


def test_weights_that_others_have_written_are_those_that_a_step_begins_with() -> None:
    hosted = model()
    optimizer = torch.optim.SGD(hosted.parameters(), lr=1.0)
    steps = HostSteps(optimizer)
    host_updates(hosted, optimizer, steps, [True])
    with torch.no_grad():
        hosted.first.bias.data.fill_(3.0)  # as a load does, past any counter of versions

    steps.start_micro_batch(first=True, last=True)
    hosted.third.bias.sum().backward()
    with steps.in_place(optimizer):
        optimizer.step()
        steps.write_back()

    assert torch.equal(hosted.first.bias, torch.full((8,), 3.0))


def test_weights_are_copied_to_the_host_once_and_where_others_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = model()
    optimizer = adamw(hosted)
    steps = HostSteps(optimizer)
    copied: list[int] = []
    copy_ = steps._copy  # noqa: SLF001 - the copies to the host are counted

    def counting(target: Tensor, source: Tensor) -> None:
        copied.append(source.numel()) if isinstance(target, nn.Parameter) else None
        copy_(target, source)

    monkeypatch.setattr(steps, "_copy", counting)
    host_updates(hosted, optimizer, steps, [True])
    assert copied == [value.numel() for value in hosted.parameters()], "before the first step alone"

    copied.clear()
    with torch.no_grad():
        hosted.second.weight.data.copy_(hosted.second.weight.flip(0))  # the same numbers in other places
        hosted.third.bias.data.neg_()
    host_updates(hosted, optimizer, steps, [True])
    assert copied == [hosted.second.weight.numel(), hosted.third.bias.numel()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.mul_(2.0),
        lambda value: value.neg_(),
        lambda value: value[:2].neg_(),
        lambda value: value.copy_(value.flip(0)),
    ],
    ids=["doubled", "negated", "two signs", "the other way round"],
)
def test_other_weights_have_another_fingerprint(dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = host_steps._fingerprint(values)  # noqa: SLF001

    change(values)

    assert host_steps._fingerprint(values) != before  # noqa: SLF001


def test_twins_of_a_step_that_failed_are_not_taken_for_the_weights() -> None:
    hosted = model()
    optimizer = torch.optim.SGD(hosted.parameters(), lr=1.0)
    steps = HostSteps(optimizer)
    host_updates(hosted, optimizer, steps, [True])
    before = hosted.first.bias.detach().clone()

    steps.start_micro_batch(first=True, last=True)
    hosted(rows(0)).sum().backward()
    with pytest.raises(ZeroDivisionError), steps.in_place(optimizer):
        optimizer.step()
        raise ZeroDivisionError
    steps.start_micro_batch(first=True, last=True)
    hosted.third.bias.sum().backward()
    with steps.in_place(optimizer):
        optimizer.step()
        steps.write_back()

    assert torch.equal(hosted.first.bias, before)


def test_gradients_that_are_whole_in_several_turns_add_up() -> None:
    plain, hosted = model(), model()
    optimizers = adamw(plain), adamw(hosted)
    steps = HostSteps(optimizers[1])

    for number in (1, 2, 3):
        plain(rows(number)).sum().backward()
    optimizers[0].step()
    steps.start_micro_batch(first=True, last=True)
    for number in (1, 2, 3):
        hosted(rows(number)).sum().backward()
    with steps.in_place(optimizers[1]):
        optimizers[1].step()
        steps.write_back()

    assert all(torch.equal(value, other) for value, other in zip(plain.parameters(), hosted.parameters(), strict=True))


def test_a_pass_that_failed_leaves_nothing_in_the_next_update() -> None:
    plain, hosted = model(), model()
    optimizers = adamw(plain), adamw(hosted)
    steps = HostSteps(optimizers[1])
    steps.start_micro_batch(first=True, last=True)
    hosted(rows(9)).sum().backward()  # and its update never came
    with torch.no_grad():
        for each in (plain, hosted):
            each.second.bias.add_(1.0)

    plain_updates(plain, optimizers[0], [True])
    host_updates(hosted, optimizers[1], steps, [True])

    assert all(torch.equal(value, other) for value, other in zip(plain.parameters(), hosted.parameters(), strict=True))
