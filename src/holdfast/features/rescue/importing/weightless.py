"""Builds a run whose parameters have names, shapes and dtypes but no memory, to list the tensors of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.config.sections.algorithm import NLLConfig
from holdfast.config.verbs.dpo import DPOConfig, ScorerConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.data.batches.candidates import CandidateReader, Candidates
from holdfast.data.batches.stream import BatchStream
from holdfast.errors import ConfigError
from holdfast.models.setup.model import blueprint, cost_of
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.fingerprints import (
    fingerprint_base_of_adapters,
    fingerprint_once,
    identity,
    image_fingerprints,
    is_fingerprinted,
)
from holdfast.training.run import Evaluation, Model, Run, Training
from holdfast.training.setup.begin import Live, RunSetup, begin, read_ahead
from holdfast.training.setup.losses import supervised_objective
from holdfast.training.setup.model import unplaced_policy
from holdfast.training.setup.optimizers import optimizer_of
from holdfast.training.setup.rows import row_filter, training_reader
from holdfast.training.setup.shard_plan import make_plan

_KINDS = (SFTConfig, DPOConfig, GRPOConfig)


class BatchlessStream(BatchStream[Any, Any]):
    """A stream that holds the rows of a run and a position in them, and makes no batches."""

    def _batch_of(self, candidates: Candidates[Any]) -> Any:
        """Never called: nothing asks for the next batch."""
        raise NotImplementedError


def weightless_run(config: TrainingConfig, base: Path, world: World) -> Training:
    """Return a run at step 0; nothing has been written, and no weight is read.

    Raises:
        UserError: The configuration cannot be run, or keeps more than one model's state.
    """
    _refuse_several(config)
    if config.checkpoint.frozen == "auto":  # what is imported may have other frozen weights than model.path
        saving = config.checkpoint.model_copy(update={"frozen": "save"})
        config = config.model_copy(update={"checkpoint": saving})
    run = Run.of(config, base, world)
    started = begin(run, Live())
    fingerprint_base_of_adapters(run)
    origin = blueprint(config.model, base, seed=config.seed, scorer=config.scores)
    if is_fingerprinted(config):
        fingerprint_once(origin.directory, run.ranks)
    policy, _ = unplaced_policy(run, origin)
    without_memory(policy)
    parameters = sharded_parameters(policy)
    optimizer = optimizer_of(run, parameters, policy)
    model = Model(
        run=run,
        blueprint=origin,
        plan=make_plan(config, policy, 1, "cpu"),
        module=policy,
        optimizer=optimizer,
        averages=None,
        parameters=parameters,
        total_steps=None,
        cost=cost_of(policy, origin),
    )
    stream = _rows(run, started)
    marks = image_fingerprints(run, stream, origin)
    return Training(
        evaluation=Evaluation(model=model, objective=supervised_objective(NLLConfig(), run)),
        stream=read_ahead(run, stream, None),
        source_names=(),
        observers=(),
        identity=identity(run, stream, origin, marks),
    )


def _refuse_several(config: TrainingConfig) -> None:
    if not isinstance(config, _KINDS) or isinstance(config, ScorerConfig):
        raise ConfigError(
            f"A run of `holdfast {config.verb}` does not continue another system's checkpoint; those of sft, dpo and "
            "grpo do. Import it with --export, and name the result in model.path."
        )
    several = [
        key
        for key, is_set in {
            "critic": getattr(config, "critic", None) is not None,
            "optim.ema": config.optim.ema is not None,
            "reference.sync": getattr(getattr(config, "reference", None), "sync", None) is not None,
        }.items()
        if is_set
    ]
    if several:
        raise ConfigError(
            f"This run keeps the state of more than its model ({', '.join(several)}), which no other system's "
            "checkpoint has. Leave that out, or import with --export and begin anew from model.path."
        )


def without_memory(model: nn.Module) -> None:
    """Give every parameter addresses on the CPU that nothing is written to, for which no memory is used; ties stay."""
    replacements: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in replacements:
                numbers = torch.empty(parameter.shape, dtype=parameter.dtype)
                empty = nn.Parameter(numbers, requires_grad=parameter.requires_grad)
                replacements[id(parameter)] = replacements[id(empty)] = empty
            module.register_parameter(name, replacements[id(parameter)])


def _rows(run: Run, started: RunSetup) -> BatchlessStream:
    def tokenise(*_: Any) -> Any:
        raise NotImplementedError

    config = run.config
    reader: Any = CandidateReader(training_reader(config, started.data), tokenise, run.ranks, row_filter(run), None)
    return BatchlessStream(reader, config.data)
