"""One optimizer update: the only place in the training path that calls `backward()` and `optimizer.step()`.

The loss of an update is sum(token loss * weight) / sum(count) over all ranks and micro-batches. The denominator is
known before the first forward pass, so that the contribution of each micro-batch is final and nothing is averaged
afterwards. The global gradient norm over shards is at the end of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from holdfast.data.batches.packing import to_device
from holdfast.errors import ConfigError, RunStopped
from holdfast.objectives.base import Objective, ratio
from holdfast.optim.clipping import clip_factor, scale, step_unless_skipped, takes_tensors
from holdfast.optim.schedule import learning_rate_factor, set_learning_rates
from holdfast.parallel.collectives import add_over_ranks, reduce_sums
from holdfast.parallel.shards import local_part, set_last_micro_batch, sharded_parameters
from holdfast.training.run import Model
from holdfast.types import Batch, HostCopy, LossSum, MiniBatch


class UpdateNumbers(NamedTuple):
    """The numbers of an update, equal on every rank."""

    metrics: dict[str, float]
    sums: Mapping[str, tuple[float, float]]
    """(total, denominator) over all ranks of the metrics that are means."""


@dataclass
class Update:
    """An update that was made or skipped, and its numbers, for which the device may still be waited.

    The counters of skipped updates count it when it is read; updates are read in their order.
    """

    model: Model
    numbers: HostCopy
    """Total and denominator of each sum, and the loads of experts."""
    names: tuple[str, ...]
    """Names of the sums; one is the square of the gradient norm."""
    known: dict[str, float]
    """Metrics that need no device."""
    step: int
    """Steps of the model when the update was made, its own included if it ends one."""
    ends_step: bool
    was_updating: bool
    logprobs: tuple[Tensor, ...] = ()
    """[N] of this rank's scored tokens before the update, micro-batch by micro-batch, detached."""

    def read(self) -> UpdateNumbers:
        """Return the update's numbers, once; on a GPU this waits until the device has made it.

        Raises:
            RunStopped: Too many updates in a row were skipped.
        """
        model, state = self.model, self.model.state
        with nullcontext() if self.numbers.is_read else model.run.phase("optimizer"):
            values = self.numbers.read().tolist()
        sums = {name: (values[2 * index], values[2 * index + 1]) for index, name in enumerate(self.names)}
        norm = math.sqrt(sums.pop(_NORM)[0])
        made = _is_made(norm)
        if not self.ends_step:
            model.updating = self.was_updating or made
        if made or norm == 0.0:
            state.skipped_in_a_row = 0
        else:
            state.skipped_steps += 1
            state.skipped_in_a_row += 1
        if state.skipped_in_a_row >= model.run.config.optim.max_nonfinite_steps:
            raise RunStopped(
                f"The gradient norm was not finite in {state.skipped_in_a_row} updates in a row, the last at step "
                f"{self.step}. No weight was touched by them. Lower optim.lr, or look at the data of these steps."
            )
        metrics = {name: total / denominator if denominator else 0.0 for name, (total, denominator) in sums.items()}
        metrics |= {
            "grad_norm": norm,
            "optim/skipped_steps": float(state.skipped_steps),
            "optim/no_gradient": float(norm == 0.0),
            **self.known,
            **dict(zip(_LOADS, values[2 * len(self.names) :], strict=False)),
        }
        return UpdateNumbers(metrics, sums)


_CAST_NUMBERS = 2**24
"""Numbers of gradients that a CPU casts to float32 at a time for their norm: 64 MiB."""
_ROW = 1024
_NORM = "grad_norm"
_LOADS = ("router/load_max", "router/load_min", "router/idle_experts")


def train_step(
    model: Model,
    mini_batch: MiniBatch,
    objective: Objective,
    *,
    source_names: Sequence[str] = (),
    ends_step: bool = True,
) -> Update:
    """Make one update of a model; its numbers are read by `Update.read`, which may wait for the device.

    A mini-batch without a trained token has loss 0 and still runs every collective. An update whose gradient norm is
    not finite is skipped on all ranks and counted. An update whose gradient is exactly zero, as when all rewards of a
    step are equal, is not made either: the momentum of Adam would move the weights without a gradient.

    Args:
        model: The model to update.
        mini_batch: The micro-batches of the update.
        objective: The loss.
        source_names: Data sources whose losses are reported separately, if there are several.
        ends_step: False if more updates belong to this step; no checkpoint can be taken before the last of them.
    """
    start, total = model.state.schedule_start, model.total_steps
    factor = learning_rate_factor(
        model.run.config.optim.schedule, start + model.state.step, None if total is None else start + total
    )
    factor *= model.rate_on_plateau
    group_rates = set_learning_rates(model.updater, factor)
    rates = {"learning_rate": model.run.config.optim.lr * factor}
    rates |= {f"learning_rate/{group}": rate for group, rate in group_rates.items()}
    denominator = mini_batch.count if mini_batch.count > 0 else 1.0
    sums: dict[str, Tensor] = {}
    sent: Tensor | None = None
    logprobs: list[Tensor] = []
    _refuse_split(model, mini_batch)
    model.run.log.batches += mini_batch.micro_batches
    with model.run.phase("forward_backward"):
        for index, micro_batch in enumerate(mini_batch.micro_batches):
            last = index == len(mini_batch.micro_batches) - 1
            set_last_micro_batch(model.module, model.plan, first=index == 0, last=last)
            if model.host_steps is not None:
                model.host_steps.start_micro_batch(first=index == 0, last=last)
            batch = to_device(micro_batch, model.run.world.device)
            output = model.module(
                batch,
                objective,
                temperature=model.temperature,
                entropy=model.run.config.metrics.entropy,
            )
            assert isinstance(output, LossSum)
            torch.autograd.backward(output.loss / denominator)
            logprobs.append(output.scores.values.detach())
            batch_sums = (
                {"loss": ratio(output.loss, batch.count)} | output.sums | _by_source(source_names, batch, output)
            )
            sums = {name: value + sums[name] if name in sums else value for name, value in batch_sums.items()}
            if output.router_loads is not None:
                sent = output.router_loads if sent is None else sent + output.router_loads
    loads = extreme_loads(sent)
    model.restore()
    host = model.host_steps
    with model.run.phase("optimizer"), nullcontext() if host is None else host.in_place(model.updater):
        update = _update(model, sums, loads, mini_batch, ends_step=ends_step)
    update.known = {**rates, "num_tokens": float(model.state.tokens), **mini_batch.metrics}
    update.logprobs = tuple(logprobs)
    return update


def _update(
    model: Model, sums: dict[str, Tensor], loads: Tensor | None, mini_batch: MiniBatch, *, ends_step: bool
) -> Update:
    parameters = [parameter for group in model.updater.param_groups for parameter in group["params"]]
    give_zero_gradients(parameters)
    gradients = local_gradients(parameters)
    device = model.run.world.device
    # Copies of the shards (HSDP) hold the same gradients: the sum over all ranks counts each `replicate` times.
    squares = squared_norm(gradients, device) / model.plan.replicate
    reduced = reduce_sums({**sums, _NORM: ratio(squares, 0.0)}, device)
    state, was_updating = model.state, model.updating
    values = torch.stack(list(reduced.values())).flatten()
    values = values if loads is None else torch.cat([values, loads])
    numbers = _make(model, parameters, gradients, values, 2 * list(reduced).index(_NORM))
    model.updater.zero_grad(set_to_none=True)
    state.updates += 1
    if ends_step:
        _end_step(model)
    state.tokens += mini_batch.tokens
    state.samples += mini_batch.samples
    return Update(model, numbers, tuple(reduced), {}, state.step, ends_step, was_updating)


def _make(
    model: Model, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], values: Tensor, norm_index: int
) -> HostCopy:
    """Make an update unless it is skipped, and let averages follow it; return its numbers, on their way to the host.

    Args:
        model: The model.
        parameters: Those of its optimizer.
        gradients: This rank's shards of them.
        values: The numbers, over all ranks.
        norm_index: Index of the squared gradient norm in them.
    """
    device, clip_norm, skipped = model.run.world.device, model.run.config.optim.clip_norm, None
    if takes_tensors(model.updater, parameters, device):
        model.updating = True
        skipped = step_unless_skipped(model.updater, values[norm_index].sqrt(), clip_norm)
        _write_back(model)
    numbers = HostCopy(values, _WAIT)
    if skipped is not None and device.type != "cpu":
        if model.averages is not None:
            model.averages.update(model.parameters, model.state.step, skipped)
        return numbers
    norm = math.sqrt(numbers.read()[norm_index])  # the host needs it, or has it without waiting
    if skipped is None and _is_made(norm):
        scale(gradients, clip_factor(norm, clip_norm))
        model.updating = True
        model.updater.step()
        _write_back(model)
    if model.averages is not None and _is_made(norm):
        model.averages.update(model.parameters, model.state.step)
    return numbers


def _write_back(model: Model) -> None:
    if model.host_steps is not None:
        model.host_steps.write_back()


_WAIT = "sums and gradient norm of an update"


def _is_made(norm: float) -> bool:
    """Return whether an update is made: without a gradient, momentum alone must not move the weights."""
    return norm > 0.0 and math.isfinite(norm)


def _end_step(model: Model) -> None:
    """Count a step and let the reference follow, before a checkpoint can be taken."""
    following, step = model.following, model.state.step + 1
    due = following is not None and following.is_due(step)
    model.updating |= due  # from here on, and until it has followed, the reference is of another step than the count
    model.state.step = step
    if due:
        assert following is not None
        following.follow(sharded_parameters(model.module), model.state.step)
    model.updating = False


def _by_source(source_names: Sequence[str], batch: Batch, output: LossSum) -> dict[str, Tensor]:
    """Return the summed negative log-likelihood of each data source's trained tokens."""
    if len(source_names) < 2:
        return {}
    index = {name: number for number, name in enumerate(source_names)}
    of_sequence = torch.tensor([index[name] for name in batch.sources] or [0])
    of_sequence = of_sequence.to(batch.tokens.device, non_blocking=True)  # `device=` above would wait for the device
    of_token = of_sequence[batch.sequence_ids.flatten()[batch.scored]]
    totals = torch.zeros(2, len(index), dtype=torch.float64, device=batch.tokens.device)
    totals[0].index_add_(0, of_token, -output.scores.logprobs.double())
    totals[1].index_add_(0, of_token, torch.ones_like(of_token, dtype=torch.float64))
    return {f"nll/{name}": totals[:, number] for name, number in index.items()}


def _refuse_split(model: Model, mini_batch: MiniBatch) -> None:
    """Refuse the router loss `batch` for an update of several micro-batches, unless that was accepted.

    Raises:
        ConfigError: The result would depend on the split.
    """
    section, several = model.run.config.model.router_loss, len(mini_batch.micro_batches)
    if model.module.router_loss is not None and section.kind == "batch" and not section.allow_split and several > 1:
        raise ConfigError(
            f"model.router_loss: batch balances what one forward pass sees, and the update of step "
            f"{model.state.step + 1} takes {several} micro-batches, since rows gave more sequences than one each. "
            "Raise data.tokens_per_micro_batch, use router_loss: sequence, or accept that the result depends on the "
            "split: router_loss: {kind: batch, allow_split: true}."
        )


def extreme_loads(loads: Tensor | None) -> Tensor | None:
    """Return [3], of any layer over all ranks: an expert's largest and smallest load, and the number of idle experts.

    A load of 1 is an expert's even share.

    Args:
        loads: [layers, E] how many tokens this rank sent to each expert; None without experts.
    """
    if loads is None:
        return None
    total = add_over_ranks(loads)
    relative = total * total.shape[1] / total.sum(1, keepdim=True).clamp(min=1.0)
    return torch.stack([relative.max(), relative.min(), (total == 0).sum()])


def local_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return this rank's part of every gradient that exists."""
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def give_zero_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Give parameters that the backward pass did not reach a zero gradient, as sharded units do when they reduce.

    Without it an unused weight would decay on two ranks and stay as it is on one. A unit that no rank ran, such as a
    vision tower in an update without images, does not reduce at all.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of this rank's gradients, a float64 scalar on `device`.

    Norms of tensors, on the CPU of rows of tensors, are taken in float32 or better; their squares are added in float64,
    so that many small tensors are not lost beside a large one.
    """
    on_cpu = [gradient for gradient in gradients if gradient.device.type == "cpu"]
    on_gpu = [gradient for gradient in gradients if gradient.device.type != "cpu" and gradient.numel()]
    pieces = (torch.split(gradient.flatten(), _CAST_NUMBERS) for gradient in on_cpu)
    norms = [_norms_of_rows(piece) for piece in chain.from_iterable(pieces)]
    for dtype in dict.fromkeys(gradient.dtype for gradient in on_gpu):
        of_dtype = [gradient for gradient in on_gpu if gradient.dtype == dtype]
        # torch's optimizers and `clip_grad_norm_` use these private kernels too: one launch for all tensors, not one
        # per tensor, and no copy of narrow ones.
        norms.append(torch.stack(torch._foreach_norm(of_dtype, 2, torch.promote_types(dtype, torch.float32))))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat([each.to(device=device, dtype=torch.float64) for each in norms]).square().sum()


def _norms_of_rows(values: Tensor) -> Tensor:
    """Return the norms of the rows of 1,024 into which [N] values are laid, and of what is left.

    The CPU's norm of 2^24 numbers in float32 is 6e-4 too small, and a shard's would have another error than the whole.
    """
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    whole = wide.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(wide[:whole].view(-1, _ROW), dim=1)
    return torch.cat([rows, torch.linalg.vector_norm(wide[whole:])[None]])
