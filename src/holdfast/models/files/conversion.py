"""Convert between the tensors of a file and those of a model by transformers' own mapping, one group at a time.

transformers 5 renames, stacks and splits weights when it loads a directory (Mixtral's experts become one tensor) and
reverses this when it saves. This module applies the same mapping to one group of related tensors at a time, so that no
rank holds more than one converted tensor. Plans are made from shapes alone, on the meta device: missing, unknown and
misshapen tensors are found before any data is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.errors import ModelError


class Header(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Conversion:
    """Tensors that are converted together."""

    sources: tuple[str, ...]
    targets: Mapping[str, Header]
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """Sources by name -> targets by name. The dictionary is emptied, so that sources can be freed on the way."""
    renames_only: bool = False
    """Whether a single source becomes a single target without a change of its values."""
    rows: tuple[tuple[str, ...], ...] | None = None
    """For stacked experts, the sources of each row of the single target; None if rows do not have separate sources."""


@dataclass(frozen=True)
class WeightsConversion:
    """The conversions from the tensors of a directory to those of a model."""

    conversions: tuple[Conversion, ...]
    used: tuple[Any, ...]
    """transformers' transforms that matched a tensor; an export reverses only these."""


def plan_incoming(
    model: Any, stored: Mapping[str, Header], origin: str, *, absent: Collection[str] = ()
) -> WeightsConversion:
    """Plan how stored tensors fill a model.

    Args:
        model: A transformers model, on any device; only names and shapes are read.
        stored: What the files hold.
        origin: Where they are, for messages.
        absent: Tensors of the model that come from somewhere else.

    Raises:
        ModelError: A tensor is missing, unknown, or of another shape than the model's.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    model_headers = {name: Header(tuple(value.shape), value.dtype) for name, value in model.state_dict().items()}
    transforms = get_model_conversion_mapping(model)
    renamings, converters, by_pattern = _sorted_out(transforms)
    groups: dict[str, _Group] = {}
    unknown = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, model_headers)
        if target not in model_headers and name in model_headers:
            target, pattern = name, None
        if target not in model_headers:
            unknown.append(name)
            continue
        group = groups.setdefault(target, _Group(target, by_pattern.get(pattern or "")))
        group.members.append((name, pattern or name))
    conversions = tuple(group.conversion(model, stored, ()) for group in groups.values())
    ignored = _ignored(unknown, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    needed = {name: header for name, header in model_headers.items() if name not in absent}
    _check_complete(model, conversions, needed, [name for name in unknown if name not in ignored], origin)
    return WeightsConversion(conversions, tuple(entry for entry in transforms if entry.was_used()))


def plan_outgoing(model: Any, headers: Mapping[str, Header], used: Sequence[Any] | None) -> tuple[Conversion, ...]:
    """Plan how a model's tensors become the names and shapes that its directories have.

    Args:
        model: A transformers model, on any device.
        headers: The model's tensors to write, one name of each tie.
        used: The transforms that matched when the weights came in; None if they did not come from a directory.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, dot_natural_key

    if used is None:
        # Whether a prefix was there before is known only from the files, so without files none is added.
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        used = [entry for entry in transforms if not isinstance(entry, PrefixChange)]
    backwards = [entry.reverse_transform() for entry in reversed(list(used))]
    renamings, converters, by_pattern = _sorted_out(backwards)
    groups: dict[str, _Group] = {}
    for name in sorted(headers, key=dot_natural_key):
        target, pattern = _first_match(name, converters)
        if pattern is None:
            target = _rename(name, renamings)
        group = groups.setdefault(target, _Group(target, by_pattern.get(pattern or "")))
        group.members.append((name, pattern or name))
    return tuple(group.conversion(model, headers, renamings) for group in groups.values())


def renamed(names: Mapping[str, str], headers: Mapping[str, Header]) -> tuple[Conversion, ...]:
    """Return the plan that gives each tensor its name in a file and changes nothing else.

    Args:
        names: The model's name of each tensor, by its name in the file.
        headers: Shapes and dtypes in the file.
    """
    return tuple(
        Conversion((source,), {target: headers[target]}, dict, renames_only=True) for target, source in names.items()
    )


def _sorted_out(transforms: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return renamings, converters, and converters by each pattern they start from."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    return renamings, converters, {pattern: entry for entry in converters for pattern in entry.source_patterns}


class _Group:
    """Tensors that share a target, and the transform that joins them."""

    def __init__(self, target: str, transform: Any | None) -> None:
        self.target = target
        self.transform = transform
        self.members: list[tuple[str, str]] = []
        """(name, pattern it matched)"""

    def conversion(self, model: Any, headers: Mapping[str, Header], renamings: Iterable[Any]) -> Conversion:
        sources = tuple(name for name, _ in self.members)
        if self.transform is None:
            if len(sources) != 1:
                raise ModelError(f"{', '.join(sources)} would all become {self.target}.")
            target = {self.target: headers[sources[0]]}
            return Conversion(sources, target, lambda tensors: {self.target: tensors[sources[0]]}, renames_only=True)

        def run(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            # A copy: a transform collects the tensors that it was given, and each group runs several times (on meta, by
            # rows).
            transform = copy.deepcopy(self.transform)
            assert transform is not None
            for name, pattern in self.members:
                if name in tensors:
                    transform.add_tensor(self.target, name, pattern, tensors.pop(name))
            converted = transform.convert(self.target, model=model, config=model.config)
            flat = {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
            return {_rename(name, renamings): value for name, value in flat.items()}

        targets = self._targets(run, headers)
        return Conversion(sources, targets, run, rows=self._rows(targets))

    def _targets(
        self, run: Callable[[dict[str, Tensor]], dict[str, Tensor]], headers: Mapping[str, Header]
    ) -> dict[str, Header]:
        """Run the conversion on the meta device, where shapes cost nothing."""
        inputs = {name: headers[name] for name, _ in self.members}
        on_meta = {name: torch.empty(item.shape, dtype=item.dtype, device="meta") for name, item in inputs.items()}
        try:
            return {name: Header(tuple(value.shape), value.dtype) for name, value in run(on_meta).items()}
        except (RuntimeError, ValueError, IndexError) as error:
            sources = " and ".join(f"{len(names)} tensors like {names[-1]}" for names in self._by_pattern())
            raise ModelError(f"{self.target} cannot be made from {sources}: {error}") from error

    def _by_pattern(self) -> list[list[str]]:
        names: dict[str, list[str]] = {}
        for name, pattern in self.members:
            names.setdefault(pattern, []).append(name)
        return list(names.values())

    def _rows(self, targets: Mapping[str, Header]) -> tuple[tuple[str, ...], ...] | None:
        """Return the sources of each row, if the transform stacks them along dimension 0 and leaves rows apart."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        first, *further_operations = self.transform.operations  # type: ignore[union-attr]  # only converters come here
        joins_rows = any(not isinstance(step, Concatenate) or step.dim == 0 for step in further_operations)
        if not isinstance(first, MergeModulelist) or first.dim != 0 or joins_rows or len(targets) != 1:
            return None
        return tuple(zip(*self._by_pattern(), strict=True))


def _rename(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _first_match(name: str, converters: Iterable[Any]) -> tuple[str, str | None]:
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return renamed, pattern
    return name, None


def _ignored(names: Sequence[str], patterns: Iterable[str] | None) -> list[str]:
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns or ())]


def _check_complete(
    model: nn.Module,
    conversions: Sequence[Conversion],
    expected: Mapping[str, Header],
    unknown: Sequence[str],
    origin: str,
) -> None:
    from holdfast.models.names import tied_names

    converted = {name: header for conversion in conversions for name, header in conversion.targets.items()}
    covered = set(converted) | set(_ignored(list(expected), getattr(model, "_keys_to_ignore_on_load_missing", None)))
    for first, duplicates in tied_names(model).items():
        if covered & {first, *duplicates}:
            covered |= {first, *duplicates}
    missing = [name for name in expected if name not in covered]
    misshapen = [
        f"{name} is {list(header.shape)}, the model wants {list(expected[name].shape)}"
        for name, header in converted.items()
        if name in expected and header.shape != expected[name].shape
    ]
    unknown = [*unknown, *(name for name in converted if name not in expected)]
    listings = [
        _listing("missing tensors", missing),
        _listing("tensors the model does not know", unknown),
        _listing("tensors of another shape", misshapen),
    ]
    problems = "; ".join(listing for listing in listings if listing)
    if problems:
        raise ModelError(
            f"{origin} does not fit {type(model).__name__}: {problems}. Check that its config.json belongs to "
            "its weights."
        )


def _listing(title: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    more = f" and {len(items) - 4} more" if len(items) > 4 else ""
    return f"{len(items)} {title} ({', '.join(items[:4])}{more})"
