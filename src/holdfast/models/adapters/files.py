"""Adapters in peft's file format, and the initial values of adapters: random, derived from the base, or from files."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.config.quiet import broken
from holdfast.config.sections.model import LoRAConfig
from holdfast.errors import ModelError
from holdfast.files import expanded, read_json
from holdfast.models.adapters.live import Adapter, adapters_of, lengths, whole_modules
from holdfast.models.files.conversion import Header
from holdfast.models.files.four_bit import FourBitLinear, four_bit_layers, packed
from holdfast.models.files.loading import RowSlices, WeightGroup, WeightSource
from holdfast.models.files.origin import files_fingerprint
from holdfast.models.files.safetensors_files import read_header
from holdfast.models.heads.scorer import LAYER
from holdfast.models.names import named_parameters

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
"""Names of peft's two files."""

PEFT_PREFIX = "base_model.model."
"""Prefix of names in peft's files."""

BASE = "holdfast_base"
"""Key in the header of our files; its value is the fingerprint of the base weights of the adapters."""


def names_in_file(model: nn.Module) -> list[str]:
    """Return the canonical names of the parameters that peft's file holds: adapters, and modules trained whole."""
    return [*_adapter_names(model), *(name for names in (whole_modules(model) or {}).values() for name in names)]


def _adapter_names(model: nn.Module) -> list[str]:
    return [name for adapter in adapters_of(model).values() for name in adapter.names]


def _names_to_read(model: nn.Module, stored: AdapterFile) -> list[str]:
    """Return what is taken from a file: what is trained whole may also begin as it is in the base, but for a scorer."""
    parameters = named_parameters(model)
    adapters = _adapter_names(model)
    scorer = [LAYER] if adapters and LAYER in parameters else []
    trained = [name for name, value in parameters.items() if value.requires_grad]
    trained_in_file = [name for name in trained if name in stored.headers]
    return list(dict.fromkeys((*adapters, *scorer, *trained_in_file)))


_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+?)"
    r"(?:\.(?P<part>lora_[AB]|lora_magnitude_vector)(?:\.(?!weight$)[^.]+)?(?P<weight>\.weight)?)?"
)
"""A name in a file of adapters. Those that peft writes begin with `base_model.model.`, end in `lora_magnitude_vector`
without `.weight` and do not name the adapter; exports of Holdfast say `.weight`, and a plain state_dict names it."""


def name_in_file(name: str) -> str:
    """Return the canonical name of a tensor in a file of adapters, whichever of the forms it has."""
    match = _NAME.fullmatch(name)
    if match is None or match["part"] is None:
        return name.removeprefix(PEFT_PREFIX)
    return f"{match['layer']}.{match['part']}.weight"


@dataclass(frozen=True)
class AdapterFile:
    """Adapters in peft's format."""

    path: Path
    headers: Mapping[str, Header]
    """Headers of the tensors by canonical name."""
    stored_names: Mapping[str, str]
    """Canonical name -> that in the file."""
    base: str | None
    """Fingerprint of their base weights; None in files of other programs."""

    @classmethod
    def at(cls, directory: Path) -> AdapterFile:
        """Open a directory that peft, or an export of ours, wrote.

        Raises:
            ModelError: The directory has no adapter, or two of one name.
        """
        from safetensors import safe_open

        path = directory / WEIGHTS
        if not path.exists():
            raise ModelError(f"model.lora.path: {directory} has no {WEIGHTS}. Name a directory in peft's format.")
        stored = read_header(path)
        stored_names: dict[str, str] = {}
        for name in stored:
            canonical = name_in_file(name)
            if canonical in stored_names:
                raise ModelError(
                    f"model.lora.path: {path} holds {canonical} twice, as {stored_names[canonical]} and as {name}. "
                    "Save one adapter alone."
                )
            stored_names[canonical] = name
        headers = {canonical: stored[name] for canonical, name in stored_names.items()}
        with safe_open(path, framework="pt") as file:
            return cls(path, headers, stored_names, (file.metadata() or {}).get(BASE))

    def read(self, name: str, row_slice: slice) -> Tensor:
        """Return some rows of a tensor by its canonical name."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            rows: Tensor = file.get_slice(self.stored_names[name])[row_slice]
        return rows


@dataclass(frozen=True)
class AdapterSource:
    """A source of a model's tensors (packed where they are stored in 4 bits) and of its adapters.

    A is initialised uniformly within 1 / sqrt(in), B with zeros, and a DoRA magnitude with the norms of the rows of its
    matrix. If a directory is given, adapters and fully trained modules are read from it instead.
    """

    base: WeightSource
    headers: Mapping[str, Header]
    """Headers of the tensors that are not derived from the base."""
    seed: int
    stored: AdapterFile | None
    lengths_of: Mapping[str, Adapter]
    """Matrix to the adapter whose magnitude starts at its lengths."""
    packed: Mapping[str, FourBitLinear]
    storage: torch.dtype
    """Dtype in which frozen matrices are stored."""

    @classmethod
    def of(  # noqa: PLR0913 - what adapters start from
        cls,
        base: WeightSource,
        model: nn.Module,
        section: LoRAConfig,
        seed: int,
        directory: Path | None,
        storage: torch.dtype,
    ) -> AdapterSource:
        """Plan the adapters of a model.

        Raises:
            ModelError: The directory's adapters are others than the model's.
        """
        parameters, adapters = named_parameters(model), adapters_of(model)
        stored = None if directory is None else AdapterFile.at(directory)
        names = [name for adapter in adapters.values() for name in (adapter.a, adapter.b)]
        lengths_of = {name: adapter for name, adapter in adapters.items() if adapter.magnitude is not None}
        if stored is not None:
            names, lengths_of = _names_to_read(model, stored), {}
        headers = {name: Header(tuple(parameters[name].shape), torch.float32) for name in names}
        if stored is not None:
            _refuse_others(headers, stored, str(section.path))
        return cls(base, headers, seed, stored, lengths_of, dict(four_bit_layers(model)), storage)

    def groups(self) -> Iterator[WeightGroup]:
        """Yield the model's groups, then one per adapter tensor."""
        in_base: set[str] = set()
        for group in self.base.groups():
            stored = set(self.headers) & set(group.targets)
            in_base |= stored
            adapters = {name: self.lengths_of[name] for name in group.targets if name in self.lengths_of}
            layers = {name: self.packed[name] for name in group.targets if name in self.packed}
            derived = _derived(group, adapters, layers, self.storage) if adapters or layers else group
            yield derived if self.stored is None or not stored else _partly_stored(derived, stored, self.stored)
        for name, header in self.headers.items():
            if name not in in_base:
                yield _start(name, header, self.seed, self.stored)


def check_base(directory: Path, stored: AdapterFile, section: LoRAConfig) -> None:
    """Compare the weights that adapters were trained beside with those in a directory.

    Raises:
        ModelError: The weights differ, and `section` does not allow another base.
    """
    if stored.base is None or section.any_base:
        return
    directory_mark = files_fingerprint(directory)
    if stored.base == directory_mark:
        return
    stored_mark, directory_mark = (mark.split("-")[-1] for mark in (stored.base, directory_mark))
    raise ModelError(
        f"model.lora.path: {stored.path.parent} holds adapters that were trained beside other weights than those in "
        f"{directory}: the mark of their files is {stored_mark[:12]}, here it is {directory_mark[:12]}. Name their own "
        "model in model.path; if it is the same one in other files, set model.lora.any_base: true."
    )


def _refuse_others(headers: Mapping[str, Header], stored: AdapterFile, path: str) -> None:
    stored_shapes = {name: header.shape for name, header in stored.headers.items()}
    expected_shapes = {name: header.shape for name, header in headers.items()}
    if stored_shapes != expected_shapes:
        different = sorted(
            name for name in {*stored_shapes, *expected_shapes} if stored_shapes.get(name) != expected_shapes.get(name)
        )
        raise ModelError(
            f"model.lora.path {path} holds other adapters than model.lora describes, first at {different[0]}: "
            f"{stored_shapes.get(different[0], 'none')} there, {expected_shapes.get(different[0], 'none')} here. Set "
            "rank, targets, experts, dora and train as they were."
        )


def _derived(
    group: WeightGroup, adapters: Mapping[str, Adapter], layers: Mapping[str, FourBitLinear], storage: torch.dtype
) -> WeightGroup:
    """Return tensors of the base with what is made of their rows: each rank makes its own.

    Args:
        group: Of the base.
        adapters: By the matrices whose lengths their magnitudes start at.
        layers: By the matrices that they keep in 4 bits.
        storage: Dtype of frozen matrices.
    """
    targets = dict(group.targets)
    magnitudes = {name: str(adapter.magnitude) for name, adapter in adapters.items()}
    for name, adapter in adapters.items():
        shape = targets[name].shape
        targets[magnitudes[name]] = Header(shape[-1:] if adapter.transposed else shape[:1], torch.float32)

    def load(rows: RowSlices) -> dict[str, Tensor]:
        loaded = group.load({name: row_slice for name, row_slice in rows.items() if name in group.targets})
        # As the forward pass will compute them: of the numbers that are stored, in float32 or better.
        wide = torch.promote_types(storage, torch.float32)
        for name, adapter in adapters.items():
            if adapter.transposed:  # a length runs over all rows
                (matrix,) = group.load({name: slice(0, group.targets[name].shape[0])}).values()
                loaded[magnitudes[name]] = lengths(matrix.to(storage).to(wide).mT)[rows[magnitudes[name]]]
            else:
                loaded[magnitudes[name]] = lengths(loaded[name].to(storage).to(wide))
        return loaded | {name: packed(loaded[name], layer.kind) for name, layer in layers.items()}

    return WeightGroup(targets, load)


def _partly_stored(group: WeightGroup, names: Set[str], stored: AdapterFile) -> WeightGroup:
    """Return tensors of the base, some of them from the file of the adapters instead."""

    def load(rows: RowSlices) -> dict[str, Tensor]:
        stored_rows = {name: stored.read(name, rows[name]) for name in names & set(rows)}
        return group.load(rows) | stored_rows

    return WeightGroup(group.targets, load)


def _start(name: str, header: Header, seed: int, stored: AdapterFile | None) -> WeightGroup:
    """Return a tensor of an adapter as it begins."""

    def load(rows: RowSlices) -> dict[str, Tensor]:
        row_slice = rows[name]
        if stored is not None:
            return {name: stored.read(name, row_slice)}
        if ".lora_B." in name:
            return {name: torch.zeros(header.shape)[row_slice]}
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        # A generator per name: every rank draws the same matrix and takes its rows, whichever tensors it loads before.
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = 1.0 / math.sqrt(header.shape[1])
        return {name: torch.empty(header.shape).uniform_(-bound, bound, generator=generator)[row_slice]}

    return WeightGroup({name: header}, load)


def peft_settings(
    adapters: Mapping[str, Adapter],
    section: LoRAConfig,
    base: str,
    trained_modules: Sequence[str] = (),
    *,
    scorer: bool,
) -> str:
    """Return adapter_config.json, by which peft loads adapters onto the model in `base`.

    Args:
        adapters: By the matrices they lie beside.
        section: The run's.
        base: A directory or a name on the hub.
        trained_modules: Modules that are trained whole; of a reward model its layer `score` is one.
        scorer: Whether the model scores texts.
    """
    broken("bitsandbytes")  # peft imports it
    from peft import LoraConfig

    layers = {name.removesuffix(".weight"): adapter for name, adapter in adapters.items()}
    stacks = sorted(name for name, adapter in layers.items() if adapter.experts)
    settings = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=sorted(name for name, adapter in layers.items() if not adapter.experts),
        target_parameters=stacks or None,
        lora_dropout=section.dropout,
        use_rslora=section.rank_stabilised,
        use_dora=section.dora,
        fan_in_fan_out=any(adapter.transposed and not adapter.experts for adapter in layers.values()),
        rank_pattern=rank_patterns({name: adapter.rank for name, adapter in layers.items()}, section),
        modules_to_save=sorted(trained_modules) or None,
        base_model_name_or_path=base,
        task_type="SEQ_CLS" if scorer else "CAUSAL_LM",
        inference_mode=True,
    )
    values: dict[str, Any] = settings.to_dict()
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
    return json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n"


def modules_in(settings: str) -> tuple[str, ...]:
    """Return the modules that adapter_config.json says are held whole."""
    return tuple(json.loads(settings)["modules_to_save"] or ())


def rank_patterns(ranks: Mapping[str, int], section: LoRAConfig) -> dict[str, int]:
    """Return peft's patterns of the layers whose rank is not the usual one."""
    return {f"^{re.escape(path)}$": rank for path, rank in ranks.items() if rank != section.rank}


def note_of_base(directory: Path, model: str, here: Path) -> str | None:
    """Return what a user should read of adapters that nothing but a name ties to their base; None if it is the same.

    Args:
        directory: Of the adapters.
        model: What the run calls its model.
        here: Where that lies.
    """
    file = directory / SETTINGS
    named_base = read_json(file).get("base_model_name_or_path") if file.exists() else None
    if not named_base or str(named_base) == model or expanded(str(named_base)).resolve() == here:
        return None
    return (
        f"lora: the adapter in {directory} names {named_base} as its model, and this run's is {model}; no mark in its "
        "file tells whether the weights are the same. Beside other weights it does not do what it was trained for."
    )


def refuse_other_scale(directory: Path | None, section: LoRAConfig) -> None:
    """See that adapters to start from count by the factor they were trained with; tensors do not tell it.

    Raises:
        ModelError: They count by another one under `model.lora`, or their settings cannot be read.
    """
    if directory is None or not (directory / SETTINGS).exists():
        return
    file = directory / SETTINGS
    try:
        settings = read_json(file)
        stabilised, alone = bool(settings.get("use_rslora", False)), dict(settings.get("alpha_pattern") or {})
        stored_values = {
            "alpha": f"{settings.get('lora_alpha', section.alpha):g}",
            "rank_stabilised": str(stabilised).lower(),
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = f"{file} is not what peft writes ({error})"
        raise ModelError(f"model.lora.path: {why}. Save the adapter again.") from error
    if alone:
        raise ModelError(
            f"model.lora.path: {file} gives {len(alone)} layers an alpha of their own ({next(iter(alone))}), and "
            "model.lora has one for all. Merge this adapter into its model, and start from that."
        )
    run_values = {"alpha": f"{section.alpha:g}", "rank_stabilised": str(section.rank_stabilised).lower()}
    for name, value in run_values.items():
        if stored_values[name] != value:
            raise ModelError(
                f"model.lora.{name} is {value}, and the adapter in {directory} was trained with {stored_values[name]}: "
                f"it would count by another factor than then. Set model.lora.{name}: {stored_values[name]}."
            )
