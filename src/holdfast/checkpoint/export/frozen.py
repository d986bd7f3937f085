"""Read the frozen weights that a checkpoint leaves out from the model that it was saved beside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from holdfast.checkpoint.format.snapshot import TRAINED
from holdfast.checkpoint.inspect.tensors import StoredCheckpoint
from holdfast.checkpoint.loading.base import located_base, recorded_places
from holdfast.config.sections.model import ModelConfig
from holdfast.models.adapters.files import AdapterSource
from holdfast.models.adapters.lora import add_adapters
from holdfast.models.files.conversion import Header
from holdfast.models.files.origin import read_config
from holdfast.models.heads.scorer import is_scorer
from holdfast.models.setup.model import Blueprint, source_of, storage_of
from holdfast.parallel.shards import sharded_parameters


def frozen_weights(
    checkpoints: Sequence[StoredCheckpoint], origin: Blueprint, section: ModelConfig, base: Path | None
) -> tuple[dict[str, Header], Callable[[str], Tensor]]:
    """Return shape and dtype of the frozen weights that checkpoints of one model leave out, and what reads them.

    Of whole checkpoints there are none.

    Args:
        checkpoints: Of one model.
        origin: That model, as the checkpoints describe it.
        section: The run's model section. Its path is looked up from the current directory if nothing is where the run
            read it.
        base: The directory of the frozen weights; None looks where the run read them.

    Raises:
        CheckpointMismatch: The weights that they were saved beside are not there, or others are.
    """
    last = checkpoints[-1]
    if TRAINED not in last.manifest.contents:
        return {}, dict[str, Tensor]().__getitem__
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
    groups = {name: group for group in source.groups() for name in group.targets if name in headers}

    def read(name: str) -> Tensor:
        group = groups[name]
        rows = {target: slice(0, header.shape[0] if header.shape else None) for target, header in group.targets.items()}
        return group.load(rows)[name].to(headers[name].dtype)

    return headers, read
