"""The whole loss of a policy: its parts together, in chunks, on idle ranks, and through both forms of the head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from holdfast.config.sections.policy import (
    CISPOConfig,
    ClipConfig,
    CorrectionConfig,
    EntropyConfig,
    GSPOConfig,
    GSPOTokenConfig,
    KLConfig,
    MaskConfig,
    NoCorrectionConfig,
    OffPolicyMaskConfig,
    ReinforceConfig,
    SAPOConfig,
    TruncateConfig,
)
from holdfast.data.batches.packing import pack
from holdfast.objectives.base import Tokens, scored_tokens
from holdfast.objectives.policy import PolicyGradient, build_policy_objective
from holdfast.types import Scores
from tests.models.architectures import strong_model, twin
from tests.objectives.cases import draw, means, objective_found, scores_of, tokens_of
from tests.objectives.heads import Recomputed, a_batch, through_our_head, through_transformers
from tests.oracle import policy as oracle

EXACT = {"rtol": 1e-10, "atol": 1e-10}


CLIP, NO_KL, NO_BONUS, AS_IS = ClipConfig(), KLConfig(), EntropyConfig(), NoCorrectionConfig()


def made(
    surrogate: Any = CLIP,
    kl: KLConfig = NO_KL,
    entropy: EntropyConfig = NO_BONUS,
    correction: CorrectionConfig = AS_IS,
    max_kl: float | None = None,
) -> PolicyGradient:
    return build_policy_objective(surrogate, kl, entropy, correction, OffPolicyMaskConfig(max_kl=max_kl))


KL, REWARD = KLConfig(coefficient=0.3), KLConfig(coefficient=0.3, estimator="k1", where="reward")
TO_GO = KLConfig(coefficient=0.3, estimator="k1", where="reward_to_go")
BONUS, TOP = EntropyConfig(coefficient=0.2), EntropyConfig(coefficient=0.1, top_quantile=0.5)
SEPARABLE = {
    "clip": made(),
    "dual clip": made(ClipConfig(dual_clip=1.2)),
    "delta": made(ClipConfig(delta=1.3)),
    "cispo": made(CISPOConfig(high=0.2)),
    "sapo": made(SAPOConfig()),
    "reinforce": made(ReinforceConfig()),
    "kl": made(kl=KL),
    "weighted kl": made(kl=KLConfig(coefficient=0.3, importance_weighted=True)),
    "straight through": made(kl=KLConfig(coefficient=0.3, estimator="straight_through")),
    "kl in the reward": made(kl=REWARD),
    "bonus": made(entropy=BONUS),
    "top entropy": made(entropy=TOP),
    "truncated": made(correction=TruncateConfig(cap=1.1)),
    "masked": made(correction=MaskConfig(low=0.8, high=1.2)),
    "all at once": made(CISPOConfig(), KL, TOP, TruncateConfig(cap=1.1)),
}
WHOLE = {
    "gspo": made(GSPOConfig(low=0.06, high=0.09)),
    "gspo_token": made(GSPOTokenConfig(low=0.06, high=0.09)),
    "truncated by sequence": made(correction=TruncateConfig(level="sequence")),
    "masked by sequence": made(correction=MaskConfig(low=0.95, high=1.1, level="sequence")),
    "off-policy mask": made(max_kl=0.01),
    "kl to go": made(kl=TO_GO),
    "all at once": made(GSPOConfig(), KL, TOP, MaskConfig(level="sequence"), 0.01),
}
EVERY = SEPARABLE | {f"{name}, whole": objective for name, objective in WHOLE.items()}
each_objective = pytest.mark.parametrize("objective", EVERY.values(), ids=EVERY)


@pytest.fixture(scope="module")
def model() -> Any:
    return twin(strong_model("llama", scale=2.0), torch.float64)


@pytest.mark.parametrize("objective", SEPARABLE.values(), ids=SEPARABLE)
@pytest.mark.parametrize("form", ["one pass", "recomputed"])
@pytest.mark.parametrize("proximal", [True, False], ids=["later update", "first update"])
def test_every_separable_loss_has_its_own_gradients_in_both_forms(
    model: Any, objective: PolicyGradient, form: str, proximal: bool
) -> None:
    batch = a_batch(model, proximal=proximal)
    expected, gradients = through_transformers(model, objective, batch)

    result, found = through_our_head(model, objective if form == "one pass" else Recomputed(objective), batch)

    assert objective.separable
    assert_close(result.loss, expected, **EXACT)
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("objective", WHOLE.values(), ids=WHOLE)
def test_losses_of_whole_sequences_have_their_own_gradients(model: Any, objective: PolicyGradient) -> None:
    batch = a_batch(model, proximal=True)
    expected, gradients = through_transformers(model, objective, batch)

    result, found = through_our_head(model, objective, batch)

    assert not objective.separable
    assert_close(result.loss, expected, **EXACT)
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def whole_and_in_chunks(objective: PolicyGradient) -> tuple[torch.Tensor, torch.Tensor]:
    """Return terms of all tokens at once, and of seven at a time."""
    case = draw(flat=True)
    tokens, logprobs, entropy = tokens_of(case), torch.tensor(case.logprobs), torch.tensor(case.entropy)
    chunks = [
        objective.token_terms(logprobs[start : start + 7], entropy[start : start + 7], tokens.part(start, start + 7))
        for start in range(0, logprobs.numel(), 7)
    ]
    return objective.token_terms(logprobs, entropy, tokens), torch.cat(chunks)


@pytest.mark.parametrize("objective", SEPARABLE.values(), ids=SEPARABLE)
def test_a_separable_loss_is_the_same_in_chunks_that_cut_sequences(objective: PolicyGradient) -> None:
    whole, chunks = whole_and_in_chunks(objective)

    assert_close(chunks, whole, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("objective", WHOLE.values(), ids=WHOLE)
def test_a_loss_that_is_not_separable_would_change_in_chunks(objective: PolicyGradient) -> None:
    whole, chunks = whole_and_in_chunks(objective)

    assert not torch.allclose(chunks, whole)


def test_all_parts_add_up() -> None:
    case = draw(flat=True)
    objective = made(ClipConfig(), KL, TOP, MaskConfig(low=0.8, high=1.3), max_kl=0.02)
    keep = case.entropy_mask & oracle.kept_by_policy(case, 0.02)
    weights = keep * oracle.correction(case, "mask", "token", 0.8, 1.3)
    clip, kl = oracle.clip(case, 0.2, 0.2), oracle.kl("k3", case.logprobs, case.reference)
    terms = weights * clip[0] + 0.3 * kl[0] - 0.1 * case.entropy * case.entropy_mask
    gradient = weights * clip[1] + 0.3 * kl[1] * case.weights

    found = objective_found(objective, case)

    np.testing.assert_allclose(found[0], terms, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-9, atol=1e-9)


@each_objective
def test_the_ratio_of_the_first_update_is_exactly_one(objective: PolicyGradient) -> None:
    case = draw(on_policy=True)

    shown = means(objective.sums(scores_of(case), tokens_of(case)))

    assert shown["ratio/mean"] == 1.0
    assert shown["ratio/deviation_mean"] == 0.0
    assert {value for name, value in shown.items() if name.startswith("clip_ratio")} <= {0.0}


def test_ratios_are_measured_against_the_proximal_policy() -> None:
    case = draw()

    shown = means(made().sums(scores_of(case), tokens_of(case)))

    assert shown["ratio/mean"] == pytest.approx(np.exp(case.log_ratio).mean(), rel=1e-9)
    assert shown["ratio/deviation_mean"] == pytest.approx(np.abs(np.exp(case.log_ratio) - 1).mean(), rel=1e-9)


@each_objective
def test_a_rank_without_work_has_a_loss_and_the_metrics_of_the_others(objective: PolicyGradient) -> None:
    tokens = scored_tokens(pack([], []))
    nothing = torch.zeros(0, requires_grad=True)
    entropy = torch.zeros(0, requires_grad=True)

    terms = objective.token_terms(nothing, entropy, tokens)
    terms.sum().backward()
    sums = objective.sums(Scores(nothing.detach(), torch.zeros(0), entropy.detach()), tokens)

    case = draw()
    assert terms.shape == (0,)
    assert nothing.grad is not None
    assert set(sums) == set(objective.sums(scores_of(case), tokens_of(case)))
    assert all(value.tolist() == [0.0, 0.0] for value in sums.values())


@each_objective
def test_garbage_at_masked_positions_reaches_neither_loss_nor_gradient(model: Any, objective: PolicyGradient) -> None:
    batch = a_batch(model, proximal=True)
    garbage = {
        name: values.where(batch.loss_mask, torch.tensor(bad, dtype=values.dtype))
        for (name, values), bad in zip(batch.per_token.items(), [np.inf, -np.inf, np.nan, np.nan, False], strict=True)
    }
    clean, gradients = through_our_head(model, objective, batch)

    result, found = through_our_head(model, objective, replace(batch, per_token=garbage))

    assert torch.equal(result.loss, clean.loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


@each_objective
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [1000.0, -1000.0])
def test_policies_a_thousand_nats_apart_give_finite_losses_and_gradients(
    objective: PolicyGradient, dtype: torch.dtype, far: float
) -> None:
    case = draw()
    case = replace(case, proximal=case.logprobs - far, sampler=case.logprobs + far, reference=case.logprobs + far)
    live = torch.tensor(case.logprobs, dtype=dtype, requires_grad=True)
    entropy = torch.tensor(case.entropy, dtype=dtype)

    terms = objective.token_terms(live, entropy, tokens_of(case, dtype))
    (gradient,) = torch.autograd.grad(terms.sum(), live)

    assert terms.dtype == dtype
    assert torch.isfinite(terms).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("carried", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_terms_have_the_precision_of_the_log_probabilities(carried: torch.dtype, dtype: torch.dtype) -> None:
    case = draw()
    rounded = replace(case, proximal=torch.tensor(case.proximal).to(carried).double().numpy())
    tokens = tokens_of(case)
    tokens = tokens._replace(
        per_token={**tokens.per_token, "proximal_logprobs": torch.tensor(case.proximal, dtype=carried)}
    )

    terms = made().token_terms(torch.tensor(case.logprobs, dtype=dtype), None, tokens)

    assert terms.dtype == dtype
    near = 1e-9 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(terms, oracle.clip(rounded, 0.2, 0.2)[0], rtol=near, atol=near)


def test_controllers_change_the_weights_and_nothing_else() -> None:
    objective = made(kl=KLConfig(coefficient=0.3, target=0.1), entropy=EntropyConfig(coefficient=0.2, target=1.0))
    case = draw()
    terms = oracle.clip(case, 0.2, 0.2)[0] + 0.05 * oracle.kl("k3", case.logprobs, case.reference)[0]

    changed = objective.with_coefficients(kl=0.05, entropy=0.0)
    found, _, _ = objective_found(changed, case)

    np.testing.assert_allclose(found, terms, rtol=1e-9, atol=1e-9)
    assert (changed.needs_reference, changed.needs_entropy) == (True, True)
    assert objective.kl.coefficient == 0.3


@pytest.mark.parametrize(
    ("objective", "needs"),
    [
        (made(), set()),
        (made(kl=KL), {"reference"}),
        (made(kl=REWARD), {"reference"}),
        (made(entropy=BONUS), {"entropy"}),
        (made(entropy=EntropyConfig(target=0.2)), {"entropy"}),
        (made(entropy=EntropyConfig(top_quantile=0.2)), {"entropy_mask"}),
        (made(correction=TruncateConfig()), {"sampler"}),
        (made(max_kl=0.1), {"sampler"}),
    ],
)
def test_an_objective_asks_for_what_it_uses_and_no_more(objective: PolicyGradient, needs: set[str]) -> None:
    asked = {
        name for name in ("reference", "entropy", "entropy_mask", "sampler") if getattr(objective, f"needs_{name}")
    }

    assert asked == needs


@pytest.mark.parametrize(
    ("objective", "missing"),
    [
        (made(), "advantages"),
        (made(kl=KL), "reference_logprobs"),
        (made(correction=TruncateConfig()), "sampler_logprobs"),
        (made(entropy=TOP), "entropy_mask"),
    ],
)
def test_a_value_that_is_not_carried_is_named(objective: PolicyGradient, missing: str) -> None:
    tokens = tokens_of(draw())
    left = {name: values for name, values in tokens.per_token.items() if name != missing}

    with pytest.raises(ValueError, match=f"the objective needs {missing} of every token; this batch carries "):
        objective.token_terms(
            torch.tensor(draw().logprobs), torch.tensor(draw().entropy), tokens._replace(per_token=left)
        )


def test_an_engine_without_log_probabilities_gives_empty_mismatch_metrics() -> None:
    tokens: Tokens = tokens_of(draw())
    left = {name: values for name, values in tokens.per_token.items() if name != "sampler_logprobs"}

    sums = made().sums(scores_of(draw()), tokens._replace(per_token=left))

    assert sums["sampling/mismatch_kl"].tolist() == [0.0, 0.0]
    assert all(torch.isfinite(value).all() for value in sums.values())
