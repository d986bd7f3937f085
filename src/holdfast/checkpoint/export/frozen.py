"""Read the frozen weights that a checkpoint leaves out from the model that it was saved beside."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from holdfast.checkpoint.format.snapshot import TRAINED
from holdfast.checkpoint.inspect.tensors import StoredCheckpoint
from holdfast.checkpoint.loading.base import located_base, recorded_places
from holdfast.config.sections.model import ModelConfig
from holdfast.models.adapters.files import AdapterSource
from holdfast.models.adapters.lora import add_adapters
from holdfast.models.files.conversion import Header
from holdfast.models.files.loading import WeightGroup, WeightSource
from holdfast.models.files.origin import read_config
from holdfast.models.heads.scorer import is_scorer
from holdfast.models.setup.model import Blueprint, source_of, storage_of
from holdfast.parallel.shards import sharded_parameters


class FrozenWeights(Mapping[str, Tensor]):
    """The parameters of a model that its checkpoints do not hold, read when they are asked for."""

    def __init__(self, headers: Mapping[str, Header], source: WeightSource) -> None:
        """Find the parameters in a source; `headers` have the shapes and dtypes in which a run stores them."""
        self.headers = headers
        self._groups: dict[str, WeightGroup] = {
            name: group for group in source.groups() for name in group.targets if name in headers
        }

    def __getitem__(self, name: str) -> Tensor:
        """Read a parameter, in the dtype in which a run stores it."""
        group = self._groups[name]
        rows = {target: slice(0, header.shape[0] if header.shape else None) for target, header in group.targets.items()}
        return group.load(rows)[name].to(self.headers[name].dtype)

    def __iter__(self) -> Iterator[str]:
        """Yield names."""
        return iter(self.headers)

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self.headers)


def frozen_weights(
    checkpoints: Sequence[StoredCheckpoint], origin: Blueprint, section: ModelConfig, base: Path | None
) -> FrozenWeights:
    """Return the frozen weights that checkpoints of one model leave out; none of whole checkpoints.

    Args:
        checkpoints: Of one model.
        origin: That model, as the checkpoints describe it.
        section: The run's model section. Its path is looked up from the current directory if nothing is where the run
            read it.
        base: The directory of the frozen weights; None looks where the run read them.

    Raises:
        CheckpointMismatch: The weights that they were saved beside are not there, or others are.
    """
    last, source = checkpoints[-1], origin.source
    if TRAINED not in last.manifest.contents:
        return FrozenWeights({}, source)
    for checkpoint in checkpoints:
        directory = located_base(
            checkpoint.path,
            checkpoint.manifest,
            section if base is None else section.model_copy(update={"path": str(base.absolute())}),
            Path.cwd(),
            advice="by --base of `holdfast checkpoint export` or `average`. Adapters alone are written by "
            "`holdfast checkpoint export --adapter`.",
            places=recorded_places(checkpoint.manifest) if base is None else (),
        )
    storage = storage_of(section)[1]
    model = copy.deepcopy(origin.skeleton)
    rows = read_config(directory, trust_remote_code=section.trust_remote_code).get_text_config().vocab_size
    vocabulary = rows, origin.skeleton.config.get_text_config().vocab_size
    # The output layer of a scorer is trained, and a base may lack it.
    seed = 0 if is_scorer(origin.original_config) else None
    source = source_of(origin.skeleton, None, directory, vocabulary, seed)[0]
    if section.lora is not None:
        add_adapters(model, section.lora, storage)
        source = AdapterSource.of(source, model, section.lora, 0, None, storage)
    held = last.model_headers(None)
    headers = {
        name: Header(tuple(value.shape), storage if value.is_floating_point() else value.dtype)
        for name, value in sharded_parameters(model).items()
        if name not in held
    }
    return FrozenWeights(headers, source)


def with_dtype(headers: Mapping[str, Header], dtype: torch.dtype | None) -> dict[str, Header]:
    """Return headers with floating-point dtypes replaced by `dtype` if given."""
    return {
        name: header if dtype is None or not header.dtype.is_floating_point else header._replace(dtype=dtype)
        for name, header in headers.items()
    }
