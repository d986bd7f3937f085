"""The head's product in float32: what is sampled is scored as it is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.names import named_parameters
from holdfast.rollout.engine import Request, generate
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.sampling import Stops
from tests.models.architectures import strong_model
from tests.rollout.test_inprocess import EOS, origin_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("wide", [True, False])
def test_first_tokens_are_scored_by_a_product_in_that_precision(wide: bool) -> None:
    model = strong_model("qwen3").to(torch.bfloat16).requires_grad_(False)
    # Of one token, over which any attention is exact.
    asked = [Request(number, np.array([2 + 7 * number]), (number,)) for number in range(12)]
    stops = Stops(frozenset({EOS}))
    engine = InProcessEngine(origin_of(model), CPU, torch.bfloat16, stops, float32_head=wide)
    engine.update_weights(named_parameters(model).items(), 0)

    found = generate(engine, asked, SamplingConfig(max_new_tokens=1))

    apart = {True: [], False: []}  # type: dict[bool, list[float]]
    for sampled in found:
        prompt = torch.from_numpy(asked[sampled.request_id].prompt)[None]
        hidden, head = model.model(input_ids=prompt, use_cache=False).last_hidden_state[0, -1], model.lm_head.weight
        for precision, logits in ((True, head.float() @ hidden.float()), (False, (head @ hidden).float())):
            told = float(logits.log_softmax(-1)[int(sampled.tokens[0])])
            apart[precision].append(abs(float(sampled.logprobs[0]) - told))
    assert np.median(apart[wide]) < 0.2 * np.median(apart[not wide])
