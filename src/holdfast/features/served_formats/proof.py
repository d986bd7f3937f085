"""The proof of an export: what another program answers, compared with plain transformers on the weights as they were.

Compared are the tokens of each row by the export's own tokenizer and template, the log-probabilities of its tokens, and
the most probable continuations. A continuation may part from the reference where the reference itself is undecided: its
two best tokens are no further apart than twice the limit of a log-probability.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from holdfast.features.served_formats.rows import ProofRow, retokenised

NEW_TOKENS = 16
"""Of each continuation."""


class Limits(NamedTuple):
    """Largest and mean difference of log-probabilities, in nats, that an export of a type may have."""

    largest: float
    mean: float


LIMITS = {
    "f16": Limits(0.3, 0.03),
    "q8_0": Limits(2.0, 0.3),
    "fp8": Limits(6.0, 0.6),
    "int8": Limits(6.0, 0.8),
}
"""By the type of the weights: 1.6 to 5 times what SmolLM2-135M has."""


@dataclass(frozen=True)
class Answer:
    """What a program says of a row."""

    ids: list[int]
    """Of the row, by the program's own tokenizer and template."""
    prompt_ids: list[int]
    logprobs: list[float]
    """Of each token of the row but its first."""
    greedy: list[int]
    """Most probable tokens behind the prompt."""
    margins: list[float] | None = None
    """Of a reference: by how much each of these is more probable than the next, in nats."""


@dataclass(frozen=True)
class Proof:
    """A comparison of an export with the model that it was made of."""

    program: str
    tensor_type: str
    rows: str
    """Where the rows are from."""
    tokens: int
    largest: float
    mean: float
    greedy_same: int
    """Rows whose continuations are the same, token by token."""
    greedy: int
    faults: tuple[str, ...]
    """What is outside the limits, or differs."""

    @property
    def is_within(self) -> bool:
        """Return whether nothing is."""
        return not self.faults

    @property
    def verdict(self) -> str:
        """Return the verdict in a sentence."""
        limits = LIMITS[self.tensor_type]
        numbers = (
            f"log-probabilities of {self.tokens} tokens ({self.rows}) differ by at most {self.largest:.4g} and by "
            f"{self.mean:.4g} in the mean (limits {limits.largest:g} and {limits.mean:g}); {self.greedy_same} of "
            f"{self.greedy} greedy continuations of at most {NEW_TOKENS} tokens are the same"
        )
        if self.is_within:
            return f"proved by {self.program}: {numbers}"
        return f"NOT proved by {self.program}: {'; '.join(self.faults)}. In numbers: {numbers}"

    def as_plain(self) -> dict[str, Any]:
        """Return the proof for the file about an export."""
        limits = LIMITS[self.tensor_type]
        return {
            "program": self.program, "type": self.tensor_type, "rows": self.rows, "tokens": self.tokens,
            "largest": self.largest, "mean": self.mean, "largest_limit": limits.largest, "mean_limit": limits.mean,
            "greedy_same": self.greedy_same, "greedy": self.greedy, "faults": list(self.faults),
            "is_within": self.is_within,
        }  # fmt: skip


def until_end(answers: Sequence[Answer], ends: Collection[int]) -> list[Answer]:
    """Return answers whose continuations end with the first token that ends a text: what follows is no text."""
    cut = []
    for answer in answers:
        at = next((at for at, token in enumerate(answer.greedy, start=1) if token in ends), len(answer.greedy))
        cut.append(replace(answer, greedy=answer.greedy[:at]))
    return cut


def answers_of(model: Any, tokenizer: Any, rows: Sequence[ProofRow]) -> list[Answer]:
    """Return what a model of transformers answers.

    Args:
        model: In float32.
        tokenizer: Read from beside its weights.
        rows: With tokens.
    """
    answers = []
    for row in rows:
        with torch.no_grad():
            logprobs = model(torch.tensor([row.ids])).logits[0].double().log_softmax(-1)
        targets = torch.tensor(row.ids[1:])
        chosen = logprobs[:-1].gather(1, targets[:, None])[:, 0].tolist()
        greedy, margins = _greedy(model, row.prompt_ids)
        answers.append(Answer(*retokenised(tokenizer, row), chosen, greedy, margins))
    return answers


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return the most probable tokens behind a prompt, and by how much each is more probable than the next."""
    from transformers import GenerationConfig

    tokens = torch.tensor([prompt])
    # A model's own settings would sample, penalise or end: None of them is what is compared.
    model.generation_config = GenerationConfig()
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    with torch.no_grad():
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
    best = [logits[0].double().topk(2).values for logits in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), [float(two[0] - two[1]) for two in best]


def compare(reference: Sequence[Answer], answers: Sequence[Answer], tensor_type: str, program: str, rows: str) -> Proof:
    """Compare what a program answers with the reference.

    Args:
        reference: Of plain transformers on the model as it was.
        answers: Of the program, row by row.
        tensor_type: A name in `LIMITS`.
        program: Its name and version.
        rows: Where the rows are from.
    """
    limits = LIMITS[tensor_type]
    expected = torch.tensor([value for answer in reference for value in answer.logprobs], dtype=torch.float64)
    actual = torch.tensor([value for answer in answers for value in answer.logprobs], dtype=torch.float64)
    differences = (actual - expected).abs().nan_to_num(nan=float("inf"))
    largest, mean = float(differences.max()), float(differences.mean())
    faults = [
        f"row {number} has other tokens by its tokenizer or template, from token {_parting(ours, theirs)} on"
        for number, (one, other) in enumerate(zip(reference, answers, strict=True))
        for ours, theirs in ((one.ids, other.ids), (one.prompt_ids, other.prompt_ids))
        if ours != theirs
    ][:3]
    if largest > limits.largest:
        faults.append(f"the largest difference of a log-probability is {largest:.4g}, the limit {limits.largest:g}")
    if mean > limits.mean:
        faults.append(f"the mean difference is {mean:.4g}, the limit {limits.mean:g}")
    for number, (one, other) in enumerate(zip(reference, answers, strict=True)):
        at = _parting(one.greedy, other.greedy)
        assert one.margins is not None
        if at < len(one.greedy) and one.margins[at] > 2 * limits.largest:
            faults.append(
                f"row {number} continues otherwise at token {at}, where the reference prefers its own by "
                f"{one.margins[at]:.4g} nats"
            )
            break
    same = sum(one.greedy == other.greedy for one, other in zip(reference, answers, strict=True))
    return Proof(program, tensor_type, rows, len(expected), largest, mean, same, len(reference), tuple(faults))


def _parting(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the first index at which two lists differ; the length of the first where they do not."""
    pairs = zip(ours, theirs, strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
    return at if len(ours) != len(theirs) or at < len(ours) else len(ours)
