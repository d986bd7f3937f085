"""Proves a push by comparing the engine's log-probabilities of fixed sequences with the trainer's.

Equality of sampled tokens would show little, and what a server tells of a prompt never reads its cache of keys and
values; so the 20 most probable tokens of every place are compared, and one generated token behind a prompt that is
longer than a block of the cache.

Two implementations of one model differ by rounding, which grows with depth and with how far logits are from flat. So
where a server differs by more than twins of a small model do, the trainer's own forward pass is repeated with other
roundings, and the server may differ by a small multiple of what that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from holdfast.data.batches.packing import Share, pack, to_device
from holdfast.data.content.image_files import png_url
from holdfast.data.content.lengths import Stretch, example_of
from holdfast.data.tokens.vision import ImageSide, probe_images
from holdfast.errors import RunStopped
from holdfast.features.vllm.buckets import Inspection
from holdfast.features.vllm.prompts import ServedPrompt
from holdfast.features.vllm.responses import TopRow
from holdfast.features.vllm.servers import VLLMServer
from holdfast.http import EndpointRefuses, EndpointUnwell
from holdfast.models.check.rounding import rounded_otherwise
from holdfast.models.chunks.logits import HeadWeights, factors_of, logits_of
from holdfast.models.heads.policy import without_dropout
from holdfast.training.run import Model
from holdfast.types import Batch, Example

_TOP = 20
_LENGTHS = (24, 64)
"""Tokens of the fixed sequences; one longer than a block of the cache comes beside them."""
_BEYOND_BLOCK = 32
_ROWS = 64
"""Places whose logits are there at a time."""
_FLOOR = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""In nats; what differs by less needs no measurement of rounding."""
_ROUNDINGS = {torch.float32: 6.0, torch.bfloat16: 2.5}
"""So many times what rounding changes in the trainer a server may differ; a mean varies less than a largest value."""
_ROUNDING_PASSES = 2
_LAYER_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Of one layer, relative to its largest output."""
_MOST_NAMED = 4


@dataclass(frozen=True)
class ProofSequence:
    """A fixed sequence for which a server and the trainer tell log-probabilities."""

    served: ServedPrompt
    example: Example
    """The sequence, with one token more, which its last place predicts; tokens of images are not compared."""

    def __len__(self) -> int:
        """Return the number of places that are compared."""
        return self.example.trained_tokens

    def asked(self, server: VLLMServer, adapter: str) -> list[TopRow]:
        """Return what a server says of the places that are compared."""
        rows = server.tops(self.served, _TOP, adapter)
        return [row for row, trained in zip(rows, self.example.loss_mask[1:].tolist(), strict=True) if trained]


Suspects = Mapping[str, Inspection]
"""What servers say of their tensors, by address."""

ServerAnswers = Mapping[str, Sequence[Sequence[TopRow]]]
"""By address, sequence and place."""


@dataclass(frozen=True)
class Proof:
    """The differences that a proof measured on one server, in nats."""

    url: str
    difference: float
    """Largest difference of log-probabilities, in nats; in bfloat16 the mean difference."""
    of_prompts: float
    """The difference on prompts alone; only generated tokens read the cache of keys and values."""
    from_before: float
    """Largest difference from what the server said after the push before; infinite at the first."""


class Prover:
    """Compares servers with the trainer after a push. Every rank has a prover, since the forward pass is collective.

    Args:
        tolerance: Largest permitted difference in nats; with None, the trainer's own rounding decides.
        block: Number of tokens in a block of the servers' caches.
        longest: Number of tokens in the servers' contexts, or of the run's longest row where that is less.
        images: Turns the images of rows into tokens, where the policy sees some.
    """

    def __init__(self, tolerance: float | None, block: int, longest: int, images: ImageSide | None = None) -> None:
        self._tolerance, self._images, self._longest = tolerance, images, longest
        self.lengths = tuple(min(size, longest - 1) for size in (*_LENGTHS, block + _BEYOND_BLOCK))
        """Tokens of the fixed sequences."""
        self.limit = 0.0
        """Of the last proof, in nats; on rank 0."""
        self._before: dict[str, Sequence[Sequence[TopRow]]] = {}

    def prove(
        self,
        model: Model,
        servers: Sequence[VLLMServer],
        inspect: Callable[[Sequence[str]], Suspects],
        adapter: str = "",
    ) -> list[Proof]:
        """Return what was measured, on rank 0; all ranks call this together.

        Args:
            model: The policy.
            servers: Those that were pushed to.
            inspect: Asks servers, by address, what of the weights they have otherwise; called on all ranks together.
            adapter: Name of the adapter that was pushed; "" where whole weights were.

        Raises:
            RunStopped: A server says other numbers than the trainer, or none; on all ranks.
        """
        ranks, is_first = model.run.ranks, model.run.world.is_first
        dtype: torch.dtype = getattr(torch, model.plan.compute_dtype)
        sequences = self._sequences(model)
        answers = ranks.on_first_rank(lambda: _ask(servers, sequences, adapter))
        logprobs = _score(model, sequences, answers)
        proofs = self._measured(dtype, answers, logprobs, sequences) if is_first else []
        self.limit = self._tolerance or _FLOOR[dtype]
        wrong = ranks.agree(_beyond(proofs, self.limit))
        if wrong and self._tolerance is None:
            rounding = _rounding(model, sequences, answers, logprobs)
            self.limit = max(self.limit, _ROUNDINGS[dtype] * rounding)
            wrong = ranks.agree(_beyond(proofs, self.limit))
        if wrong:
            with ranks.together():
                suspects = inspect(wrong)
                if is_first:
                    names = _names(suspects, dtype, "in the adapter" if adapter else "between them")
                    raise RunStopped(_words(wrong, proofs, self.limit, names))
        self._before = dict(answers)
        return proofs

    def _sequences(self, model: Model) -> list[ProofSequence]:
        """Return the fixed sequences, one with an image where the policy sees; all ranks call this together."""
        sequences = _sequences(model, self.lengths)
        if self._images is not None:
            seen = _with_image(self._images, sequences[0])
            if seen.example.tokens.size <= self._longest:
                return [*sequences, seen]
            if not self._before and model.run.world.is_first:
                print(
                    f"warning: pushes are proved by text alone: a small image makes {seen.example.tokens.size} tokens, "
                    f"and rows or the servers' contexts have {self._longest} (data.max_length)",
                    flush=True,
                )
        return sequences

    def _measured(
        self,
        dtype: torch.dtype,
        answers: ServerAnswers,
        logprobs: Mapping[str, Tensor],
        sequences: Sequence[ProofSequence],
    ) -> list[Proof]:
        ends = torch.as_tensor(np.cumsum([len(sequence) for sequence in sequences]) - 1)
        proofs = []
        for url, ours in logprobs.items():
            rows = (ours - _values(answers[url])).abs()  # [N, 20]
            of_prompts = torch.ones(len(rows), dtype=torch.bool)
            of_prompts[ends] = False
            before = _apart(answers[url], self._before[url]) if url in self._before else float("inf")
            proofs.append(Proof(url, _measure(rows, dtype), _measure(rows[of_prompts], dtype), before))
        return proofs


def _beyond(proofs: Sequence[Proof], limit: float) -> list[str]:
    return [proof.url for proof in proofs if not proof.difference <= limit]  # NaN is beyond every limit


def _measure(differences: Tensor, dtype: torch.dtype) -> float:
    return float(differences.mean() if dtype is torch.bfloat16 else differences.max())


def _names(suspects: Suspects, dtype: torch.dtype, otherwise: str) -> str:
    """Say which tensors a server has otherwise than they were sent, or why that cannot be told.

    Args:
        suspects: What servers say.
        dtype: They compute in.
        otherwise: Where the fault lies if every tensor is what was sent.
    """
    limit = _LAYER_TOLERANCE[dtype]
    sizes = [pair for suspect in suspects.values() for pair in suspect.differences.items()]
    different = {name for name, value in sizes if value is not None and not value <= limit}
    if different:
        return f"these tensors are not what was sent: {_some(different)}"
    silent, every = {name for name, value in sizes if value is None}, {name for name, _ in sizes}
    mute = [suspect.why_not for suspect in suspects.values() if suspect.why_not]
    if mute:
        return (
            f"which tensor it is cannot be told: our worker extension there does not say, {mute[0]}; servers that "
            "`holdfast serve` starts have one that does"
        )
    if silent == every:
        return "which tensor it is cannot be told: no layer there can be asked by itself"
    if silent:
        return (
            f"which tensor it is cannot be told: layers that cannot be asked by themselves have {_some(silent)}, and "
            "all others are what was sent"
        )
    return f"every layer, asked by itself, computes with what was sent, so what is wrong lies {otherwise}"


def _some(names: Set[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(sorted(names)[:_MOST_NAMED])}{more}"


def _words(wrong: Sequence[str], proofs: Sequence[Proof], limit: float, names: str) -> str:
    """Say which servers differ, and what that looks like."""
    differing = [proof for proof in proofs if proof.url in wrong]
    first = differing[0]
    errors = ", ".join(f"{proof.url} by {proof.difference:.2g} nats" for proof in differing)
    agreement = f" ({len(proofs) - len(wrong)} others agree)" if len(wrong) < len(proofs) else ""
    if first.of_prompts <= limit:
        why = "prompts agree and generated tokens do not: the cache of keys and values is of older weights"
    elif first.from_before <= limit:
        why = f"it says what it said before the push: its weights are stale; {names}"
    else:
        why = f"all bytes arrived as they were sent, so what went wrong lies behind the transfer; {names}"
    return (
        f"After a push of weights servers say other log-probabilities than the trainer: {errors}{agreement}; at most "
        f"{limit:.2g} is allowed (rollout.engine.tolerance). {why[0].upper()}{why[1:]}. Nothing was sampled from them. "
        "Start the servers again; the same command goes on from the last checkpoint."
    )


def _apart(first: Sequence[Sequence[TopRow]], second: Sequence[Sequence[TopRow]]) -> float:
    """Return the largest difference of numbers that two answers share."""
    rows = [pair for a, b in zip(first, second, strict=True) for pair in zip(a, b, strict=True)]
    return max((abs(a[token] - b[token]) for a, b in rows for token in a.keys() & b.keys()), default=float("inf"))


def _sequences(model: Model, lengths: Sequence[int]) -> list[ProofSequence]:
    """Return fixed sequences of tokens that mean nothing."""
    vocabulary = int(model.blueprint.skeleton.config.get_text_config().vocab_size)
    plain = np.array([token for token in range(vocabulary) if token not in model.blueprint.family.image_marks])
    draw = np.random.default_rng(20)
    drawn = [plain[draw.integers(0, plain.size, size)].astype(np.int64) for size in lengths]
    examples = [example_of(_one_more(Stretch(tokens.tolist(), [True] * tokens.size)), 0, "") for tokens in drawn]
    return [
        ProofSequence(ServedPrompt(tokens.tolist()), example) for tokens, example in zip(drawn, examples, strict=True)
    ]


def _one_more(stretch: Stretch) -> Stretch:
    return replace(stretch, tokens=[*stretch.tokens, stretch.tokens[0]], trained=[*stretch.trained, True])


def _with_image(images: ImageSide, text: ProofSequence) -> ProofSequence:
    """Return the tokens of a sequence with an image of noise among them."""
    half = len(text.served.tokens) // 2
    tokens = [*text.served.tokens[:half], *images.placeholder_ids, *text.served.tokens[half:]]
    example = images.probe(np.asarray([*tokens, tokens[0]], np.int64), 0)
    urls = [png_url(image) for image in probe_images(1, 0)]
    served = ServedPrompt(example.tokens[:-1].tolist(), images.marked(tokens, "a proof"), urls)
    return ProofSequence(served, example)


def _ask(
    servers: Sequence[VLLMServer], sequences: Sequence[ProofSequence], adapter: str
) -> dict[str, list[list[TopRow]]]:
    """Return what every server says of the sequences, by address.

    Raises:
        RunStopped: One does not answer.
    """
    answers: dict[str, list[list[TopRow]]] = {}
    with ThreadPoolExecutor(max(1, len(servers))) as threads:
        waiting = {
            server.url: threads.submit(
                lambda target: [sequence.asked(target, adapter) for sequence in sequences], server
            )
            for server in servers
        }
        for url, future in waiting.items():
            try:
                answers[url] = future.result()
            except (EndpointRefuses, EndpointUnwell) as error:
                raise RunStopped(
                    f"The server at {url} took the weights, and then {error}, so the push cannot be proved. Look at "
                    "its log; the same command goes on from the last checkpoint."
                ) from error
    return answers


def _batches(model: Model, sequences: Sequence[ProofSequence]) -> Iterator[tuple[slice, Batch]]:
    """Yield the sequences in batches of text alone and of text with an image, which do not go together."""
    for sees in (False, True):
        numbers = [index for index, sequence in enumerate(sequences) if bool(sequence.example.model_inputs) == sees]
        if numbers:
            group = slice(numbers[0], numbers[-1] + 1)
            examples = [sequence.example for sequence in sequences[group]]
            batch = pack(examples, [Share(1.0, 1.0)] * len(examples), padded=model.module.padded)
            yield group, to_device(batch, model.run.world.device)


def _rows(sequences: Sequence[Sequence[TopRow]]) -> list[TopRow]:
    return [row for rows in sequences for row in rows]


def _tokens(rows: Sequence[TopRow]) -> Tensor:
    # A row may have one token more: the prompt's own, where it is not among the most probable ones.
    return torch.tensor([list(row)[:_TOP] for row in rows])


def _values(sequences: Sequence[Sequence[TopRow]]) -> Tensor:
    """Return a server's log-probabilities, [N, 20]."""
    return torch.tensor([list(row.values())[:_TOP] for row in _rows(sequences)], dtype=torch.float64)


def _score(model: Model, sequences: Sequence[ProofSequence], answers: ServerAnswers) -> dict[str, Tensor]:
    """Return the trainer's log-probabilities [N, 20] of the servers' tokens by address, on rank 0."""
    chunks: dict[str, list[Tensor]] = {url: [] for url in answers}
    for group, batch in _batches(model, sequences):
        rows = {url: _rows(answer[group]) for url, answer in answers.items()}
        look = partial(_gather, rows, model, chunks) if model.run.world.is_first else _ignore
        with without_dropout(model.module):
            model.module.show_predictors(batch, look)
    return {url: torch.cat(values) for url, values in chunks.items() if values}


def _rounding(
    model: Model,
    sequences: Sequence[ProofSequence],
    answers: ServerAnswers,
    logprobs: Mapping[str, Tensor],
) -> float:
    """Return by how much other roundings change the trainer's log-probabilities, the same on all ranks."""
    dtype: torch.dtype = getattr(torch, model.plan.compute_dtype)
    device, ranks = model.run.world.device, model.run.ranks
    largest = 0.0
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for seed in range(_ROUNDING_PASSES):
            torch.manual_seed(seed)
            # Compiled blocks do not see hooks that come later.
            with torch.compiler.set_stance("force_eager"), rounded_otherwise(model.module, torch.finfo(dtype).eps):
                moved = _score(model, sequences, answers)
            sizes = [_measure((moved[url] - values).abs(), dtype) for url, values in logprobs.items()]
            largest = max([largest, *sizes])
    return ranks.agree(largest)


def _gather(
    flat: Mapping[str, Sequence[TopRow]],
    model: Model,
    logprobs: dict[str, list[Tensor]],
    hidden: Tensor,
    head: HeadWeights,
) -> None:
    """Take the trainer's log-probabilities of the servers' tokens, a few places at a time."""
    spec = model.module.head_spec
    hidden, head = factors_of(hidden, head, spec)
    for start in range(0, len(hidden), _ROWS):
        chunk = slice(start, start + _ROWS)
        logits, _ = logits_of(hidden[chunk], head, spec)
        scores = logits.log_softmax(-1).cpu()
        for url, rows in flat.items():
            logprobs[url].append(scores.gather(1, _tokens(rows[chunk])).double())


def _ignore(hidden: Tensor, head: HeadWeights) -> None:
    """Look at nothing: rank 0 compares."""
