"""Evaluation: loss on named sets, and completions compared with their answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast.config.sections.metrics import CompletionsConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.batches.packing import to_device
from holdfast.data.batches.stream import SampleStream
from holdfast.errors import RunStopped, how_to_go_on
from holdfast.objectives.base import ratio
from holdfast.parallel.collectives import reduce_sums
from holdfast.rollout.engine import Request, RolloutEngine, generate
from holdfast.rollout.local.recurrent import agree_on_decoding
from holdfast.rollout.sampling import mixed
from holdfast.training.directory import COMPLETIONS
from holdfast.training.engines import build_engine, give_weights
from holdfast.training.rollout_memory import limit_blocks
from holdfast.training.run import Evaluation, Model, Run
from holdfast.types import Example, Finish, LossSum, MiniBatch, host_value

Prepare = Callable[[MiniBatch], MiniBatch]
"""Adds columns that a loss needs to a mini-batch; called by all ranks together, with the policy in evaluation mode."""


@dataclass(frozen=True)
class ComparedCompletion:
    """A completion and the reference answer that it is compared with."""

    sample_id: int
    prompt: str
    completion: str
    reference: str
    correct: bool
    finished: bool


def evaluate(
    evaluation: Evaluation,
    label: str | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    prepare: Prepare = lambda mini_batch: mini_batch,
) -> dict[str, float]:
    """Return eval/<set>/<metric> for every evaluation set; all ranks call this together.

    Completions are written to completions/<label>.<set>.jsonl; the label is the step by default. `interrupted` is asked
    before every batch, the same on all ranks: what was begun is then left, and only finished sets are returned.
    `prepare` adds to a batch what its loss compares with.
    """
    model = evaluation.model
    run = model.run
    label = label or f"step-{model.state.step:08d}"
    metrics: dict[str, float] = {}
    options = run.config.evaluation.completions
    with run.phase("evaluation"):
        engine = None
        for held_out in evaluation.sets:
            set_metrics = evaluate_loss(evaluation, held_out.open_stream(), interrupted, prepare)
            if set_metrics is None:
                return metrics
            if options is not None:
                if engine is None:
                    agree_on_decoding(model.blueprint, run.ranks.gather)
                    engine = build_engine(model)
                    give_weights(engine, model)
                    limit_blocks(engine, model)
                examples = run.ranks.on_all_ranks(lambda: held_out.read_prompts(options.samples))  # noqa: B023 - called now
                completed = evaluate_completions(engine, model, examples, options)
                if completed is None:
                    return metrics
                more, answered = completed
                set_metrics |= more
                keep_completions(run, label, held_out.name, partial(write_completions, answered))
            metrics |= {f"eval/{held_out.name}/{name}": value for name, value in set_metrics.items()}
    return metrics


@torch.no_grad()
def evaluate_loss(
    evaluation: Evaluation, stream: SampleStream, interrupted: Callable[[], bool], prepare: Prepare
) -> dict[str, float] | None:
    """Return the mean loss and its companions over one pass, the same on every rank; None if it was interrupted."""
    model, device = evaluation.model.module, evaluation.model.run.world.device
    model.eval()
    sums: dict[str, Tensor] = {}
    step = 0
    while (mini_batch := stream.next(step)) is not None:
        if interrupted():
            model.train()
            return None
        for micro_batch in prepare(mini_batch).micro_batches:
            batch = to_device(micro_batch, device)
            output = model(batch, evaluation.objective)
            assert isinstance(output, LossSum)
            batch_sums = {"loss": ratio(output.loss, batch.count)} | output.sums
            sums = {name: value + sums[name] if name in sums else value for name, value in batch_sums.items()}
        step += 1
    model.train()
    reduced = reduce_sums(sums, device)
    totals = host_value(torch.stack(list(reduced.values())), "sums of an evaluation").tolist() if reduced else []
    numbers = dict(zip(reduced, totals, strict=True))
    return {name: total / denominator if denominator else 0.0 for name, (total, denominator) in numbers.items()}


def evaluate_completions(
    engine: RolloutEngine, model: Model, examples: Sequence[Example], options: CompletionsConfig
) -> tuple[dict[str, float], list[ComparedCompletion]] | None:
    """Complete this rank's prompts and compare with their last trained span.

    A completion is correct if its text, special tokens and outer white space left out, is the reference's.

    Returns:
        Metrics over all ranks, and on rank 0 all ranks' completions by sample id; None if a rank was asked to stop
        meanwhile.
    """
    tokenizer = model.blueprint.tokenizer
    answers = {number: split_at_answer(example) for number, example in enumerate(examples)}
    requests = [_request(number, example, len(answers[number][0])) for number, example in enumerate(examples)]
    sampling = SamplingConfig(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    own_answers = []
    completions = generate(engine, requests, sampling, model.run.interrupted)
    if any(model.run.ranks.gather(any(sampled.finish is Finish.ABORT for sampled in completions))):
        return None
    for sampled in completions:
        prompt, reference = answers[sampled.request_id]
        text = tokenizer.decode(sampled.tokens.tolist(), skip_special_tokens=True)
        expected = tokenizer.decode(reference, skip_special_tokens=True)
        finished = sampled.finish is Finish.STOP
        right = finished and text.strip() == expected.strip()
        prompt_text = tokenizer.decode(_images_shortened(prompt, model.blueprint.family.image_token_id))
        own_answers.append(
            ComparedCompletion(examples[sampled.request_id].sample_id, prompt_text, text, expected, right, finished)
        )
    everyone = model.run.ranks.gather_to_first(own_answers)
    answered = sorted((item for rank_answers in everyone for item in rank_answers), key=lambda item: item.sample_id)
    sums = [len(own_answers), sum(item.correct for item in own_answers), sum(item.finished for item in own_answers)]
    count, correct, finished_count = model.run.ranks.summed(np.array(sums)).tolist()
    if not count:
        return {}, []
    return {"completions/accuracy": correct / count, "completions/finished": finished_count / count}, answered


def _request(number: int, example: Example, size: int) -> Request:
    """Return a request to continue the first tokens of a sequence, which hold all of its images."""
    positions = None if example.positions is None else example.positions[:, :size]
    seeds = (mixed(0, example.sample_id),)
    return Request(number, example.tokens[:size], seeds, example.model_inputs, positions)


def _images_shortened(tokens: Sequence[int], image: int | None) -> list[int]:
    """Return tokens to be read by people: an image token once where it stands many times."""
    pairs = zip(tokens, [None, *tokens], strict=False)
    return [token for token, before in pairs if token != image or before != image]


def split_at_answer(example: Example) -> tuple[list[int], list[int]]:
    """Return what comes before the last trained span, and the span."""
    trained = np.flatnonzero(example.loss_mask)
    breaks = np.flatnonzero(np.diff(trained) > 1)
    start = int(trained[breaks[-1] + 1]) if breaks.size else int(trained[0])
    end = int(trained[-1]) + 1
    return example.tokens[:start].tolist(), example.tokens[start:end].tolist()


def keep_completions(run: Run, label: str, name: str, write: Callable[[Path], None]) -> None:
    """Write completions/<label>.<name>.jsonl on rank 0; all ranks call this together.

    Raises:
        RunStopped: The disk does not take it; on all ranks, so that what was trained can be saved.
    """

    def written() -> None:
        path = run.directory / COMPLETIONS / f"{label}.{name.replace('/', '-')}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        except OSError as error:
            raise RunStopped(
                f"The completions of the evaluation {label} cannot be written: {error}. Make room, or put a directory "
                f"there that this user can write to. {how_to_go_on(1)}"
            ) from error

    run.ranks.on_first_rank(written)


def write_completions(answered: Sequence[ComparedCompletion], path: Path) -> None:
    """Write one JSON object per completion."""
    lines = [json.dumps(asdict(item), ensure_ascii=False) for item in answered]
    # Half an emoji, which UTF-8 cannot hold, is written as JSON's own escape of it.
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
