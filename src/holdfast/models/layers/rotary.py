"""Rotary angles that depend on how long a text is.

transformers reads that length from the largest position of a whole forward pass, and dynamic scaling from earlier
passes too. Here every text of a batch gets the angles that it has alone, by transformers' own functions: the rotary
modules compute them text by text, on copies that know one length each, so nothing is kept and no buffer changes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.errors import ModelError

_LONGROPE = "longrope"
_DYNAMIC = "dynamic"
_FACTORS = ("factor", "mscale")
"""What LongRoPE has twice, for short and for long texts: factors of wavelengths, and Phi-3.5-MoE's of amplitudes."""
_MOST_LENGTHS = 1024
"""Lengths whose frequencies are remembered; dynamic scaling has some for every length."""


class AngleChange(NamedTuple):
    """Where a model's angles begin to depend on the length of a text."""

    length: int
    """Tokens of the longest text that has the angles of a short one."""
    by_length: bool
    """Whether beyond it every length has angles of its own; else all longer texts share theirs."""

    def angles_of(self, length: int) -> int:
        """Return a length that stands for all lengths of the same angles."""
        if length <= self.length:
            return self.length
        return length if self.by_length else self.length + 1


def rotary_boundaries(config: Any) -> tuple[int, ...]:
    """Return lengths L such that a text of L tokens and one of L + 1 follow different rotary angles, ascending.

    Args:
        config: transformers' configuration of a model; that of its language model counts.
    """
    return tuple(sorted({change.length for change in angle_changes(config)}))


def angle_changes(config: Any) -> tuple[AngleChange, ...]:
    """Return where the angles of a model change; nothing if they never do.

    LongRoPE (arXiv:2402.13753) has two sets of factors. Dynamic NTK scaling has angles of their own for every length
    beyond `max_position_embeddings`.

    Args:
        config: As in `rotary_boundaries`.
    """
    text = copy.deepcopy(config.get_text_config())
    if not getattr(text, "rope_parameters", None):
        return ()
    text.standardize_rope_params()  # brings fields of older files to where transformers reads them
    by_layer_type = [parameters for parameters in text.rope_parameters.values() if isinstance(parameters, Mapping)]
    changes = set()
    for settings in by_layer_type or [text.rope_parameters]:
        kind = str(settings.get("rope_type", "default"))
        # Hunyuan's files say dynamic and name a factor `alpha`, which fixes the angles for every length.
        if not settings.get("alpha") and (change := _change(kind, settings, text)) is not None:
            changes.add(change)
    return tuple(sorted(changes))


def angles_by_length(configs: Iterable[Any]) -> Callable[[int], Hashable] | None:
    """Return what is the same for two lengths if they have the same angles in every model; None if all lengths have.

    Args:
        configs: transformers' configurations of the models that read the same packs.
    """
    changes = [change for config in configs for change in angle_changes(config)]
    return (lambda length: tuple(change.angles_of(length) for change in changes)) if changes else None


def _change(kind: str, settings: Mapping[str, Any], config: Any) -> AngleChange | None:
    if _DYNAMIC in kind:
        return AngleChange(int(config.max_position_embeddings), by_length=True)
    if kind == _LONGROPE and any(settings.get(f"short_{name}") != settings.get(f"long_{name}") for name in _FACTORS):
        return AngleChange(int(settings["original_max_position_embeddings"]), by_length=False)
    return None


def _changes_of(module: nn.Module) -> dict[str | None, tuple[str, AngleChange]]:
    """Return a rotary module's kinds of angles that depend on length, by type of layer; None stands for all."""
    kinds: Any = getattr(module, "rope_type", None)
    config: Any = getattr(module, "config", None)
    if kinds is None or not getattr(config, "rope_parameters", None):
        return {}
    changes = {}
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        change = _change(str(kind), settings, config)
        if change is not None:
            changes[layer_type] = (str(kind), change)
    return changes


def keep_short_angles(model: nn.Module) -> None:
    """Let a model compute the angles of short texts for all, as it is used where no text that counts is longer.

    Rows that have ended go on for some tokens while others are decoded, and would turn the angles of all of them.
    """
    for module in model.modules():
        if _changes_of(module):
            module.forward = partial(_own_angles, module)


@torch.no_grad()
def _own_angles(module: nn.Module, *args: Any, **options: Any) -> Any:
    """Compute angles from the frequencies a module has, without the step that chooses others."""
    return inspect.unwrap(type(module).forward)(module, *args, **options)


class _Stretch(NamedTuple):
    """Consecutive tokens of a row that share their rotary angles."""

    tokens: int
    length: int
    """Length of the text that the tokens belong to; of any of the texts if several share a head."""


class RotaryAngles:
    """The rotary modules of a model whose angles depend on the length of a text; mostly there are none.

    Args:
        model: Its rotary modules compute through this object from now on: by transformers' own rule for one text, until
            `follow` says which texts lie in a pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._changes = {module: changes for module in model.modules() if (changes := _changes_of(module))}
        self._rows: tuple[tuple[_Stretch, ...], ...] | None = None
        self._frequencies: dict[tuple[Any, ...], Tensor] = {}
        for module in self._changes:
            module.forward = partial(self._angles, module)

    def follow(
        self,
        rows: Sequence[Sequence[int]],
        branches: Sequence[Sequence[int]] = (),
        span: tuple[int, int] | None = None,
    ) -> None:
        """Say which texts lie in the passes that follow, until it is said anew: a block may be computed again later.

        Args:
            rows: Tokens of the texts of each row, from left to right. Of several rows, the first text counts, and what
                lies behind it is padding.
            branches: Of each text of a single row, tokens of the parts that share its head; see `types.Batch`. Such
                texts have the same angles.
            span: Start and end of the positions of a single row that a pass computes; None for all.
        """
        if not self._changes:
            return
        stretches = [[_Stretch(tokens, tokens) for tokens in row] for row in rows]
        for number, branch_lengths in enumerate(branches):
            if branch_lengths:
                tokens = rows[0][number]
                lengths = [tokens - sum(branch_lengths) + size for size in branch_lengths]
                for change in (change for several in self._changes.values() for _, change in several.values()):
                    assert len({change.angles_of(length) for length in lengths}) == 1, "packing has to part such texts"
                stretches[0][number] = _Stretch(tokens, max(lengths))
        self._rows = _cut(stretches, span)

    @contextmanager
    def as_upstream(self) -> Iterator[None]:
        """Compute by transformers' own rule within the block, each pass as the first of a new model."""
        rows, self._rows = self._rows, None
        try:
            yield
        finally:
            self._rows = rows

    @torch.no_grad()
    def _angles(self, module: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        """Return what a rotary module returns, made of what it returns for each text alone.

        Args:
            module: The module.
            x: Says dtype and device.
            position_ids: [B, T] or [A, B, T]
            args, options: Its further arguments.
        """
        if self._rows is None:
            return type(module).forward(_copy(module), x, position_ids, *args, **options)
        by_row = len(self._rows) > 1
        dim = -2 if by_row else -1
        compute = inspect.unwrap(type(module).forward)
        angles = [
            compute(self._of_lengths(module, alike, x.device), x, positions, *args, **options)
            for alike, positions in self._runs(module, position_ids, by_row, dim)
        ]
        return angles[0] if len(angles) == 1 else _joined(angles, dim - 1)

    def _runs(
        self, module: nn.Module, position_ids: Tensor, by_row: bool, dim: int
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield, for each run of neighbours with the same angles, the lengths that stand for theirs, and positions."""
        assert self._rows is not None
        texts = [row[0] for row in self._rows] if by_row else self._rows[0]
        if by_row and position_ids.shape[-2] == 1:  # a model makes one row of them where it gets none
            position_ids = position_ids.expand(*position_ids.shape[:-2], len(texts), -1)
        sizes = [1 if by_row else text.tokens for text in texts]
        if position_ids.shape[dim] != sum(sizes):
            raise ModelError(
                f"{type(module).__name__} computes angles of {position_ids.shape[dim]} positions for a batch of "
                f"{sum(sizes)}, and they depend on the length of each text. Please report the architecture."
            )
        lengths = _lengths(texts, torch.split(position_ids, sizes, dim))
        alike = [self._representative(module, length) for length in lengths]
        start = 0
        for key, run in groupby(zip(alike, sizes, strict=True), itemgetter(0)):
            width = sum(size for _, size in run)
            yield key, position_ids.narrow(dim, start, width)
            start += width

    def _representative(self, module: nn.Module, length: int) -> tuple[int, ...]:
        """Return a length of the same angles for each type of a module's layers."""
        return tuple(change.angles_of(length) for _, change in self._changes[module].values())

    def _of_lengths(self, module: nn.Module, lengths: tuple[int, ...], device: torch.device) -> nn.Module:
        """Return a copy of a module that has the frequencies of one length for each type of its layers."""
        module_copy = _copy(module)
        for (layer_type, (kind, change)), length in zip(self._changes[module].items(), lengths, strict=True):
            if length > change.length:
                key = (module, layer_type, length, device)
                if key not in self._frequencies:
                    if len(self._frequencies) >= _MOST_LENGTHS:
                        self._frequencies.clear()
                    self._frequencies[key] = _frequencies(module, layer_type, kind, length, device)
                module_copy._buffers["inv_freq" if layer_type is None else f"{layer_type}_inv_freq"] = (
                    self._frequencies[key]
                )
        return module_copy


def _cut(rows: Sequence[Sequence[_Stretch]], span: tuple[int, int] | None) -> tuple[tuple[_Stretch, ...], ...]:
    """Return what of a single row lies in a span of its positions; without a span, all of all rows."""
    if span is None:
        return tuple(map(tuple, rows))
    (start, end), cut, first = span, [], 0
    for stretch in rows[0]:
        last = first + stretch.tokens
        if min(last, end) > max(first, start):
            cut.append(stretch._replace(tokens=min(last, end) - max(first, start)))
        first = last
    return (tuple(cut),)


def _lengths(texts: Sequence[_Stretch], positions: Sequence[Tensor]) -> list[int]:
    """Return the length of each text as transformers counts it: by positions, which images have fewer of than tokens.

    Args:
        texts: Of a batch.
        positions: [..., T] of each; several axes where there may be images.
    """
    if positions[0].ndim < 3:
        return [text.length for text in texts]
    return [
        int(text_positions[..., : text.tokens].max()) + 1 for text, text_positions in zip(texts, positions, strict=True)
    ]


def _copy(module: nn.Module) -> nn.Module:
    """Return a module whose changes are its own: transformers' functions write to the one they are called with."""
    module_copy = copy.copy(module)
    module_copy._buffers = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    return module_copy


def _frequencies(module: Any, layer_type: str | None, kind: str, length: int, device: torch.device) -> Tensor:
    """Return the frequencies of a text of this length, computed as transformers' models do while they run."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options = {} if layer_type is None else {"layer_type": layer_type}
    # Dynamic scaling takes the length as a tensor there; from a number it would follow in another precision.
    tokens = torch.full((), length, device=device) if _DYNAMIC in kind else length
    frequencies: Tensor = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=tokens, **options)[0]
    return frequencies


def _joined(outputs: Sequence[Any], dim: int) -> Any:
    """Join what several calls returned: a tensor each, or a tuple of tensors each."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs), dim)
    return tuple(torch.cat(several, dim) for several in zip(*outputs, strict=True))
