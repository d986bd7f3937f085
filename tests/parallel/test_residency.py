"""Memory goes to the host and comes back: tensors stay the objects that they are, and every bit returns."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from holdfast.config.sections.optim import AdamW8bitConfig
from holdfast.parallel.host_memory import HostOffload
from holdfast.parallel.storages import storages_of
from holdfast.training.setup.optimizers import build_optimizer


def sizes(*tensors: Tensor) -> list[int]:
    return [storage.nbytes() for storage in storages_of(tensors).values()]


def test_tied_weights_and_views_move_once_and_stay_the_same_objects() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    flat = model[0].weight.data.view(-1)[3:9]
    known, before = [*model.parameters()], [each.detach().clone() for each in model.parameters()]
    held = HostOffload()

    held.offload("parameters", [*known, model[1].weight, flat])

    assert held.parts == {"parameters"}
    assert sizes(*known, flat) == [0, 0, 0]
    assert [tuple(each.shape) for each in known] == [(6, 6), (6,), (6,)]
    held.offload("parameters", known)  # what rests already is left alone
    held.restore("parameters")
    assert not held.parts
    assert [id(each) for each in model.parameters()] == [id(each) for each in known]
    assert all(torch.equal(each, was) for each, was in zip(known, before, strict=True))
    assert torch.equal(flat, before[0].view(-1)[3:9])
    model(torch.ones(2, 6)).sum().backward()
    flat.zero_()
    assert model[1].weight.detach().flatten()[3:9].tolist() == [0.0] * 6


def test_quantised_state_is_taken_apart_and_goes_on_as_if_it_had_stayed() -> None:
    ends = []
    for moves in (True, False):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 96))
        optimizer, held = build_optimizer(AdamW8bitConfig(lr=0.01), {"weight": weight}), HostOffload()
        for _ in range(3):
            weight.grad = torch.randn(64, 96)
            optimizer.step()
            state = [value for value in optimizer.state[weight].values() if isinstance(value, Tensor)]
            assert any(type(value).__name__ == "OptimState8bit" for value in state)
            if moves:
                held.offload("optimizer", state, staying=[weight])
                assert len(sizes(*state)) > len(state)
                assert set(sizes(*state)) == {0}
                assert sizes(weight) == [64 * 96 * 4]
                held.restore()
        ends.append([weight.detach(), *(torch.empty(part.shape).copy_(part) for part in state)])

    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))


def test_memory_that_others_share_stays() -> None:
    whole = torch.arange(8.0)
    held = HostOffload()

    held.offload("optimizer", [whole[2:4]], staying=[whole])

    assert whole.tolist() == list(range(8))
    assert not held.parts


def test_another_thread_that_reads_brings_everything_back_for_good() -> None:
    weight, held = torch.arange(4.0), HostOffload()
    held.offload("parameters", [weight])
    found: list[list[float]] = []

    def read() -> None:
        held.restore_for_good()
        found.append(weight.tolist())

    reader = threading.Thread(target=read)
    reader.start()
    reader.join()
    held.offload("parameters", [weight])

    assert found == [[0.0, 1.0, 2.0, 3.0]]
    assert weight.tolist() == found[0]
    assert not held.parts
