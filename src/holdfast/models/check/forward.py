"""Compare our forward pass with that of transformers on a few tokens, before step 1.

An unknown soft cap, a logit scale under a new name, attention across documents, or rotary angles that depend on the
rest of a pack would all train on wrong numbers without an error. Two short documents detect most of these. A document
longer than each boundary length of the model, packed with a short one, detects the others.

The rule by which logits follow from hidden states is measured, since names of configuration fields are no proof of it.
`PolicyModel.upstream_head` compares the input of the output layer with what the backbone returned, and sends a ramp
through the model's own head; a scale, a soft cap and an offset each show on the ramp, whatever the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.data.batches.packing import Share, pack, to_device
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ModelError
from holdfast.models.check.agreement import Agreement
from holdfast.models.check.boundaries import LengthBoundaries, lengths_to_see, shortened
from holdfast.models.check.tower import check_tower
from holdfast.models.check.witness import as_files_say, follow_implementation
from holdfast.models.heads.policy import HeadProbe, PolicyModel
from holdfast.models.heads.scorer import ScoreModel
from holdfast.models.layers.attention import upstream_attention
from holdfast.models.layers.family import HeadSpec
from holdfast.types import Batch, Example, Scores

LENGTHS = (19, 23)
TOLERANCE = {torch.float64: 5e-4, torch.float32: 5e-4, torch.bfloat16: 0.1}
"""Difference of log-probabilities, as a part of the spread of a token's logits; normalisation layers compute in float32
even in a float64 model."""
LEAK_TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.bfloat16: 0.03}
SMALLEST_SPREAD = 0.1
"""Where logits are closer together than this, rounding of log-probabilities is not a small part of their spread."""
_PROBE = 9
"""Tokens of the sequence whose logits give the spread."""


@dataclass(frozen=True)
class CheckResult:
    """What the check measured: the largest change of a token's log-probability, the mean change in bfloat16."""

    difference: float
    """Between our log-probabilities and transformers'."""
    leak: float
    """Change of one document's log-probabilities when the other document changes."""
    spread: float
    """Standard deviation of a token's logits over the vocabulary; differences and limits are shares of it."""
    beyond: float
    """Difference of hidden states for documents on both sides of the model's boundaries, as a share of their norm."""
    lengths: LengthBoundaries
    """The boundaries at which `beyond` was measured."""
    head_seen: bool
    """Whether the rule of the head could be measured; if not, only log-probabilities were compared."""
    features: tuple[int, ...] = ()
    """Of images of several sizes: how many the tower makes, and as many tokens stand for each."""


@dataclass(frozen=True)
class Sides:
    """The policy, the model that its files describe, and the dtype and device of the comparison."""

    policy: PolicyModel
    witness: Any
    """The model that the files describe, from `witness_of`."""
    dtype: torch.dtype
    """Dtype of the computation."""
    device: torch.device
    images: ImageSide | None = None
    """If given, one of the documents contains an image."""


@torch.no_grad()
def check_forward(
    sides: Sides,
    *,
    may_fall_back: bool,
    agreement: Agreement = Agreement(),  # noqa: B008 - frozen
) -> tuple[CheckResult, str]:
    """Compare, and fall back to one document per row if packing is not exact and may be given up.

    All ranks call this together.

    Args:
        sides: The policy, sharded and filled, and what its files say.
        may_fall_back: `model.attention: auto`.
        agreement: Of the ranks.

    Returns:
        What was measured, and a note for the user ("" if there is nothing to say).

    Raises:
        ModelError: Our path differs from transformers'.
    """
    policy = sides.policy
    policy.eval()
    follow_implementation(sides.witness, policy.language_model)
    features = () if sides.images is None else check_tower(policy, sides.images, sides.device, agreement)
    spread, head_seen = agreement.together(lambda: _look_at_head(sides))
    note, chooses = "", may_fall_back and not policy.padded
    try:
        result = _measure(sides, spread, head_seen=head_seen)
        exact = _exact(result, sides.dtype)
        reason = f"packed documents see each other (by {result.leak:.1e})" if result.leak else "packing is not exact"
    except ModelError as error:
        if not chooses:
            raise
        exact, reason, result = False, str(error).split(". ")[0], None
    if chooses and not (exact := agreement.all_agree(exact)):
        use_padding(policy)
        note = f"attention: one document per row, since {reason}"
        result = _measure(sides, spread, head_seen=head_seen)
        exact = _exact(result, sides.dtype)
    policy.train()
    assert result is not None
    if not exact:
        raise ModelError(_words(sides, result))
    return replace(result, features=features), note


def _words(sides: Sides, result: CheckResult) -> str:
    name = sides.policy.family.name
    if not _agrees_on_short_texts(result, sides.dtype):
        return (
            f"Log-probabilities of {name} differ from transformers' own by {result.difference * result.spread:.2e} "
            f"(between documents: {result.leak * result.spread:.2e}; a token's logits spread by {result.spread:.2e}). "
            "Its logits or its attention follow a rule Holdfast does not know; please report the architecture."
        )
    lengths = ", ".join(str(length) for length in result.lengths.checked)
    return (
        f"Hidden states of {name} differ from transformers' own by {result.beyond:.2e} of their size where texts up to "
        f"and beyond {lengths} tokens lie side by side; short texts agree. Its windows or rotary angles depend on "
        "length by a rule Holdfast does not know; please report the architecture."
    )


def use_padding(policy: PolicyModel) -> None:
    """Switch to one document per row and transformers' own attention."""
    policy.padded = True
    policy.language_model.set_attn_implementation(upstream_attention(policy.language_model))  # type: ignore[operator]


def _exact(result: CheckResult, dtype: torch.dtype) -> bool:
    return _agrees_on_short_texts(result, dtype) and result.beyond <= TOLERANCE[dtype]


def _agrees_on_short_texts(result: CheckResult, dtype: torch.dtype) -> bool:
    return result.difference <= TOLERANCE[dtype] and result.leak <= LEAK_TOLERANCE[dtype]


def _look_at_head(sides: Sides) -> tuple[float | None, bool]:
    """Compare the head's rule with ours.

    Returns:
        The spread of the logits (None for a model without logits), and whether the rule could be seen.

    Raises:
        ModelError: The model makes its logits of hidden states by another rule than ours.
    """
    policy = sides.policy
    if isinstance(policy, ScoreModel):
        return None, True
    tokens = torch.as_tensor(plain_tokens(policy, sides.images, _PROBE, 1), device=sides.device)
    with as_files_say(policy.language_model, sides.witness, sides.device):
        probe = policy.upstream_head(tokens)
    if probe is None:
        return 1.0, False
    rule_is_known = check_head(policy.family.name, probe, policy.head_spec, sides.dtype)
    return max(SMALLEST_SPREAD, float(probe.logits.double().std(-1).mean())), rule_is_known


def _measure(sides: Sides, spread: float | None, *, head_seen: bool) -> CheckResult:
    first, changed, second = documents(sides.policy, sides.images)
    ours = _ours(sides, [first, second])
    after = _ours(sides, [changed, second])
    theirs = [upstream(sides, document) for document in (first, second)]
    dtype = sides.dtype
    if spread is None:  # scores may be large, and are rounded in proportion
        spread = max(SMALLEST_SPREAD, float(torch.cat(theirs).abs().mean()))
    difference, leak = change(torch.cat(ours), torch.cat(theirs), dtype), change(ours[1], after[1], dtype)
    lengths = lengths_to_see(sides.policy.language_model, sides.device)
    beyond = _beyond(sides, lengths) if lengths.checked else 0.0
    return CheckResult(difference / spread, leak / spread, spread, beyond, lengths, head_seen)


def documents(policy: PolicyModel, images: ImageSide | None) -> tuple[Example, Example, Example]:
    """Return a document, the same with other tokens, and another one; the first two have an image if there may be."""
    examples = []
    for index, size in enumerate((LENGTHS[0], LENGTHS[0], LENGTHS[1])):
        tokens = plain_tokens(policy, images, size, index)
        if images is not None and index < 2:
            tokens[tokens.size // 3] = images.image_id
        examples.append(_document(tokens, index, images))
    return examples[0], examples[1], examples[2]


def plain_tokens(policy: PolicyModel, images: ImageSide | None, size: int, seed: int) -> NDArray[np.int64]:
    """Return [size] random tokens, none of which stands for a part of an image."""
    config: Any = policy.language_model.config
    vocabulary = int(config.get_text_config().vocab_size)
    tokens = np.random.default_rng(seed).integers(0, vocabulary, size)
    if images is None:
        return tokens
    plain = next(token for token in range(vocabulary) if token not in images.marks)
    return np.where(np.isin(tokens, images.marks), plain, tokens)


def _document(tokens: NDArray[np.int64], index: int, images: ImageSide | None) -> Example:
    if images is not None:
        return images.probe(tokens, index)
    return Example(index, index, tokens, np.arange(tokens.size) > 0)


def upstream(sides: Sides, example: Example) -> Tensor:
    """Return transformers' own log-probabilities of a document's trained tokens, by the model of the files."""
    inputs: dict[str, Tensor] = {}
    if sides.images is not None and example.model_inputs:
        upstream_inputs = sides.images.upstream_inputs(example.tokens, example.model_inputs)
        inputs = {name: torch.as_tensor(each, device=sides.device) for name, each in upstream_inputs.items()}
    with as_files_say(sides.policy.language_model, sides.witness, sides.device):
        values: Tensor = sides.policy.upstream_values(torch.as_tensor(example.tokens, device=sides.device), inputs)
    return values[torch.as_tensor(example.loss_mask[1:], device=sides.device)]


def _beyond(sides: Sides, lengths: LengthBoundaries) -> float:
    """Return how far hidden states of documents at and beyond boundaries, beside a short one, differ."""
    policy = sides.policy
    sizes = [*(length + more for length in lengths.checked for more in (1, 0)), LENGTHS[0]]
    examples = [
        _document(plain_tokens(policy, sides.images, size, index), index, sides.images)
        for index, size in enumerate(sizes)
    ]
    with shortened(lengths.layers, policy.language_model, sides.witness):
        ours = policy.predicting_states(_batch(sides, examples))
        largest = 0.0
        for example, states in zip(examples, torch.split(ours, [size - 1 for size in sizes]), strict=True):
            with as_files_say(policy.language_model, sides.witness, sides.device):
                theirs = policy.upstream_hidden(torch.as_tensor(example.tokens, device=sides.device))[:-1]
            size = float(theirs.double().square().mean().sqrt())
            largest = max(largest, change(states, theirs, sides.dtype) / max(size, 1e-6))
    return largest


def change(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference of two tensors, the mean one where the computation is in bfloat16."""
    differences = (ours - theirs).abs()
    # Rounding to bfloat16 sends a token or two to other experts; a rule we do not know moves all of them.
    return float(differences.mean() if dtype == torch.bfloat16 else differences.max())


def _batch(sides: Sides, examples: Sequence[Example]) -> Batch:
    batch = pack(examples, [Share(1.0, 1.0)] * len(examples), padded=sides.policy.padded)
    return to_device(batch, sides.device)


def _ours(sides: Sides, examples: list[Example]) -> list[Tensor]:
    scores = sides.policy(_batch(sides, examples))
    assert isinstance(scores, Scores)
    return list(torch.split(scores.values, [example.trained_tokens for example in examples]))


_LIMITS = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
"""Largest deviations by dtype, as shares of the largest logit."""
_LINEAR = 1.0
"""Below it a cap changes what a scale makes of a number by less than its square over three squares of the cap."""


@dataclass(frozen=True)
class HeadRule:
    """`softcap * tanh(scale * y / softcap) + offset`, as measured."""

    scale: float
    softcap: float | None
    offset: float
    error: float
    """Deviation that the rule leaves unexplained, as a share of the largest logit."""

    def words(self) -> str:
        """Describe the rule."""
        if self.error > 1e-2:
            return "by no scale, soft cap or addition"
        terms = [f"times {self.scale:.4g}"] if abs(self.scale - 1) > 1e-3 else []
        terms += [] if self.softcap is None else [f"with a soft cap of {self.softcap:.4g}"]
        terms += [f"plus {self.offset:.4g}"] if abs(self.offset) > 1e-3 else []
        return ", ".join(terms) or "unchanged"


def check_head(name: str, probe: HeadProbe, spec: HeadSpec, dtype: torch.dtype) -> bool:
    """Compare a model's head with ours, and return whether that could be done.

    It cannot where something else than a scale lies between backbone and output layer.

    Args:
        name: Of the architecture.
        probe: What the model's own head made of a ramp.
        spec: What a run makes of what the backbone returns.
        dtype: What the model computes in.

    Raises:
        ModelError: The heads differ. The message names the rule that was measured.
    """
    sent, returned = probe.sent, probe.returned
    if sent.shape != returned.shape:
        raise ModelError(
            f"The output layer of {name} gives {sent.numel()} numbers for a token and the model returns "
            f"{returned.numel()} logits, so probabilities would be taken over others than its own. Please report the "
            "architecture."
        )
    before = _scale_before(probe, _LIMITS[dtype])
    if before is None or (probe.biased and abs(before - 1) > _LIMITS[dtype]):
        return False  # a bias is not scaled with the hidden states
    outputs, logits = sent.double() / before, returned.double()
    ours = _applied(outputs, spec.scale, spec.softcap)
    if float((ours - logits).abs().max()) > _LIMITS[dtype] * float(logits.abs().max()):
        rule = HeadRule(spec.scale, spec.softcap, 0.0, 0.0)
        raise ModelError(
            f"The logits of {name} follow from its output layer by another rule than Holdfast reads from its "
            f"configuration: measured, what the layer gives is returned {measured_rule(outputs, logits).words()}; "
            f"read, {rule.words()}. It would train on wrong probabilities; please report the architecture."
        )
    return True


def _scale_before(probe: HeadProbe, limit: float) -> float | None:
    """Return what hidden states are multiplied by before the output layer; None where they are changed otherwise."""
    hidden, entered = probe.hidden.double(), probe.entered.double()
    if hidden.shape != entered.shape:
        return None
    size = float(hidden.square().sum())
    scale = float((hidden * entered).sum()) / size if size else 1.0
    error = float((entered - scale * hidden).abs().max())
    return scale if scale and error <= limit * float(entered.abs().max()) else None


def measured_rule(outputs: Tensor, logits: Tensor) -> HeadRule:
    """Return the scale, soft cap and addition that come closest; [V] each, float64, `outputs` rising."""
    middle = outputs.abs() <= _LINEAR
    if int(middle.sum()) < 2:  # a small vocabulary
        middle = outputs.abs() <= outputs.abs().sort().values[1]
    y, z = outputs[middle], logits[middle]
    offset = float(z.mean() - y.mean() * ((y - y.mean()) * (z - z.mean())).sum() / ((y - y.mean()) ** 2).sum())
    scale = float(((y - y.mean()) * (z - z.mean())).sum() / ((y - y.mean()) ** 2).sum())
    softcap = _softcap(scale, float(outputs[-1]), float(logits[-1]) - offset)
    if softcap is not None:  # the middle is bent a little too
        scale *= 1 + float((y * y).mean()) * (scale / softcap) ** 2 / 3
        softcap = _softcap(scale, float(outputs[-1]), float(logits[-1]) - offset) or softcap
    error = float(
        (_applied(outputs, scale, softcap) + offset - logits).abs().max() / logits.abs().max().clamp(min=1e-30)
    )
    return HeadRule(scale, softcap, offset, error)


def _applied(outputs: Tensor, scale: float, softcap: float | None) -> Tensor:
    return outputs * scale if softcap is None else softcap * (outputs * scale / softcap).tanh()


def _softcap(scale: float, output: float, logit: float) -> float | None:
    """Return the cap c for which c tanh(scale * output / c) is a logit, None where nothing bends."""
    straight = abs(scale * output)
    if not 0 < abs(logit) < 0.999 * straight:
        return None
    low, high = abs(logit), 1e4 * straight
    for _ in range(200):
        cap = math.sqrt(low * high)
        low, high = (cap, high) if cap * math.tanh(straight / cap) < abs(logit) else (low, cap)
    return math.sqrt(low * high)
