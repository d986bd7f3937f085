"""Documents side by side are scored as if each were alone, for every architecture that is packed at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from holdfast.data.batches.packing import Share, pack
from holdfast.errors import ModelError
from holdfast.models.check.forward import check_forward
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.attention import PACKED, packed_attention, register_attention
from holdfast.models.layers.document_attention import Documents
from holdfast.models.layers.family import family_of
from holdfast.types import Batch, Example, Scores
from tests.models.architectures import BY_LENGTH, RECURRENT, SETTINGS, fresh, strong_model, twin
from tests.models.sides import sides_of
from tests.versions import skip_with

LENGTHS = (13, 13, 5, 1, 21)
"""Longer than the window of 6, shorter, of one token, and two of equal length next to each other."""


def documents_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Any]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, 96, length) for length in lengths]


def batch_of(documents: list[Any], *, padded: bool = False, dtype: torch.dtype = torch.float32) -> Batch:
    examples = [Example(index, index, tokens, np.arange(tokens.size) > 0) for index, tokens in enumerate(documents)]
    return pack(examples, [Share(1.0, 1.0)] * len(examples), padded=padded, dtype=dtype)


def policy_of(model: Any, *, padded: bool = False) -> PolicyModel:
    register_attention()
    model = twin(model)
    family = family_of(model)
    if not padded:
        model.set_attn_implementation(PACKED)
    return PolicyModel(model, family, family.head_spec(float32_product=False, chunk_tokens=16), padded=padded)


def scored(policy: PolicyModel, batch: Batch) -> Tensor:
    scores = policy(batch)
    assert isinstance(scores, Scores)
    return scores.logprobs


def alone(model: Any, documents: list[Any]) -> Tensor:
    """Score each document by itself with plain transformers."""
    parts = []
    for document in documents:
        tokens = torch.as_tensor(document)[None]
        logprobs = fresh(model)(input_ids=tokens).logits[0].log_softmax(-1)[:-1]
        parts.append(logprobs.gather(1, tokens[0, 1:, None]).squeeze(1))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", SETTINGS)
def test_packed_documents_are_scored_as_if_each_were_alone(kind: str) -> None:
    model = strong_model(kind)

    found = scored(policy_of(model), batch_of(documents_of()))

    assert_close(found, alone(model, documents_of()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_document_does_not_feel_what_lies_beside_it(kind: str) -> None:
    policy = policy_of(strong_model(kind))
    documents = documents_of()
    changed = [documents_of(seed=1)[0], *documents[1:]]

    before, after = (scored(policy, batch_of(packed)).split([12, 12, 4, 0, 20]) for packed in (documents, changed))

    assert float((before[0] - after[0]).detach().abs().max()) > 0.1
    for mine, theirs in zip(before[1:], after[1:], strict=True):
        # Experts multiply the tokens of all documents together, in another order when routing changes.
        assert_close(mine, theirs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", SETTINGS)
def test_packed_rows_and_padded_rows_agree(kind: str) -> None:
    model = strong_model(kind)

    packed = scored(policy_of(model), batch_of(documents_of()))
    padded = scored(policy_of(model, padded=True), batch_of(documents_of(), padded=True))

    assert_close(packed, padded, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss", "phi3:longrope", "llama:dynamic"])
def test_gradients_of_documents_of_one_batch_are_those_of_each_alone(kind: str) -> None:
    model = float64_throughout(strong_model(kind, scale=2.0))
    weights = torch.linspace(-1.0, 1.0, sum(LENGTHS) - len(LENGTHS), dtype=torch.float64)
    (alone(model, documents_of()) * weights).sum().backward()

    policy = policy_of(model, padded=kind in BY_LENGTH)
    policy.zero_grad()
    batch = batch_of(documents_of(), padded=policy.padded, dtype=torch.float64)
    (scored(policy, batch) * weights).sum().backward()

    for (name, mine), theirs in zip(policy.language_model.named_parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        # Gemma's norms add up the gradients of their weights in float32, whatever the dtype of the model.
        tolerance = 1e-6 if kind == "gemma2" and name.endswith("norm.weight") else 1e-9
        assert_close(
            mine.grad, theirs.grad, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def float64_throughout(model: Any) -> Any:
    """Return the model in float64, with attention that does not round weights to float32 as transformers' own does."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("float64_attention", float64_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("float64_attention", eager_mask)
    model = twin(model, torch.float64)
    model.set_attn_implementation("float64_attention")
    model.set_experts_implementation("eager")  # the grouped product knows no float64
    return model


def float64_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Attend over the whole row with transformers' own mask, weights written out."""
    groups = query.shape[1] // key.shape[1]
    products = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    if options.get("softcap") is not None:
        products = options["softcap"] * torch.tanh(products / options["softcap"])
    weights = (products + mask).exp()
    total = weights.sum(-1, keepdim=True)
    if options.get("s_aux") is not None:
        total = total + options["s_aux"].exp()[:, None, None]
    total = total.masked_fill(total == 0, 1.0)  # padding farther behind a row than its window sees nothing
    return (weights / total @ value.repeat_interleave(groups, 1)).transpose(1, 2), None


def test_attention_that_is_not_told_the_lengths_raises() -> None:
    policy = policy_of(strong_model("stablelm"))

    with pytest.raises(ModelError, match=r"packed documents would see each other\. Set model\.attention: sdpa"):
        policy(batch_of(documents_of()))
    with pytest.raises(ModelError, match=r"packed documents would see each other"):
        check_forward(sides_of(policy), may_fall_back=False)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("stablelm", "does not pass keyword"),
        pytest.param(
            "falcon",
            "see each other (by",
            marks=skip_with("transformers>=5.24", "Falcon passes them"),
        ),
    ],
)
def test_the_start_check_falls_back_to_one_document_per_row(kind: str, reason: str) -> None:
    model = strong_model(kind)
    policy = policy_of(model)

    result, note = check_forward(sides_of(policy), may_fall_back=True)

    assert policy.padded
    assert note.startswith("attention: one document per row, since ")
    assert reason in note
    assert result.difference < 1e-5
    found = scored(policy, batch_of(documents_of(), padded=True))
    assert_close(found, alone(model, documents_of()), rtol=0, atol=1e-5)


def test_attention_outside_the_interface_of_transformers_is_known_before_anything_runs() -> None:
    family = family_of(strong_model("falcon"))

    assert family.why_not_packed == "its attention does not go through transformers' interface"


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_are_never_packed_and_the_family_says_why(kind: str) -> None:
    model = strong_model(kind, scale=2.0)
    family = family_of(model)

    found = scored(policy_of(model, padded=True), batch_of(documents_of(), padded=True))

    assert family.why_not_packed.endswith("layers carry state across documents")
    assert RECURRENT[kind]["reason"] in family.why_not_packed
    assert_close(found, alone(model, documents_of()), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_texts_whose_length_decides_their_angles_are_never_packed(kind: str) -> None:
    model = strong_model(kind)

    found = scored(policy_of(model, padded=True), batch_of(documents_of(), padded=True))

    assert family_of(model).why_not_packed == "its rotary angles depend on the length of a text"
    assert_close(found, alone(model, documents_of()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", RECURRENT)
def test_packing_recurrent_layers_would_indeed_leak(kind: str) -> None:
    policy = policy_of(strong_model(kind, scale=2.0))
    documents = documents_of()

    before, after = (
        scored(policy, batch_of([documents_of(seed=seed)[0], documents[1]]))[12:].detach() for seed in (0, 1)
    )

    assert float((before - after).abs().max()) > 1e-3


def test_a_layer_that_leaves_its_window_to_the_mask_is_not_packed() -> None:
    model = strong_model("qwen2_moe", sliding_window=6, use_sliding_window=True, max_window_layers=0)

    with pytest.raises(ModelError, match=r"Qwen2MoeAttention does not say whether its sliding window is on"):
        policy_of(model)(batch_of(documents_of()))


def test_layers_of_an_unknown_kind_are_not_packed() -> None:
    family = family_of(strong_model("llama4_text", layer_types=["chunked_attention", "full_attention"]))

    assert family.why_not_packed == "its chunked_attention layers see tokens by a rule of their own"


class Layer(nn.Module):
    """An attention layer as far as its options matter."""


def a_call(**options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 4, generator=generator) for _ in range(3))
    documents = Documents.of((4, 5), torch.device("cpu"))
    return packed_attention(Layer(), query, key, value, None, **({"documents": documents} | options))[0]


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices", "sinks"])
def test_a_tensor_that_a_layer_hands_over_is_used_or_refused(name: str) -> None:
    with pytest.raises(ModelError, match=rf"Layer hands {name} to its attention, which packed attention does not know"):
        a_call(**{name: torch.zeros(9)})


def test_attention_to_later_tokens_is_refused() -> None:
    with pytest.raises(ModelError, match=r"attends to later tokens"):
        a_call(is_causal=False)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.3, -1.0])}], ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 9])
def test_every_query_sees_itself_and_the_tokens_before_it_within_the_window(
    options: dict[str, Any], window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 4, generator=generator).numpy()[0].astype(np.float64) for _ in range(3))
    expected = np.zeros((9, 2, 4))
    for head in range(2):
        for position in range(9):
            start = 0 if position < 4 else 4
            first = start if window is None else max(start, position - window + 1)
            products = key[head, first : position + 1] @ query[head, position] * 0.7
            if "softcap" in options:
                products = 2.0 * np.tanh(products / 2.0)
            weights = np.exp(products)
            sink = np.exp(options["s_aux"][head].item()) if "s_aux" in options else 0.0
            expected[position, head] = weights @ value[head, first : position + 1] / (weights.sum() + sink)

    found = a_call(sliding_window=window, scaling=0.7, **options)

    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-6)


def test_dropout_drops_attention_weights_only_when_asked() -> None:
    torch.manual_seed(0)

    plain, again, dropped = a_call(), a_call(dropout=0.0), a_call(dropout=0.5)
    capped, capped_dropped = a_call(softcap=3.0), a_call(softcap=3.0, dropout=0.5)

    assert torch.equal(plain, again)
    assert not torch.allclose(plain, dropped)
    assert not torch.allclose(capped, capped_dropped)
