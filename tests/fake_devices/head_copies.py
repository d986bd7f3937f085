"""Counts float32 copies of a bfloat16 head on a fake GPU: python -m tests.fake_devices.head_copies

It prints how many each use of the head makes with `model.head.dtype: float32`, and how many products in bfloat16.
"""

from __future__ import annotations

import json
from typing import Any

VOCABULARY, TOKENS = 1003, 300


def main() -> None:
    """Decode a token, score tokens, and train on them."""
    from holdfast.features.plan.execution.process import load_guard

    load_guard()
    import torch
    import torch._dynamo
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from holdfast.config.sections.rollout import SamplingConfig
    from holdfast.features.plan.execution.fake_devices import fake_devices
    from holdfast.models.chunks.logits import HeadWeights
    from holdfast.models.heads.student import HeadObserver, distilled
    from holdfast.models.layers.family import HeadSpec
    from holdfast.models.names import named_parameters
    from holdfast.models.scores import score, separable_loss
    from holdfast.objectives.supervised import Distillation
    from holdfast.rollout.local.inprocess import InProcessEngine
    from holdfast.rollout.local.predictor import RowState
    from holdfast.rollout.local.recordings import Recordings
    from holdfast.rollout.sampling import Stops
    from tests.models.architectures import strong_model
    from tests.rollout.test_inprocess import EOS, origin_of

    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # before one stand-in is several of its functions
    model = strong_model("qwen3", vocab_size=VOCABULARY).to(torch.bfloat16).requires_grad_(False)
    shape = model.lm_head.weight.shape
    origin, device = origin_of(model), torch.device("cuda")
    found: dict[str, list[int]] = {}

    copies = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}

    class Uses(TorchDispatchMode):
        """Counts copies in float32 of a matrix of the head's shape in bfloat16, and products in bfloat16."""

        def __init__(self, use: str) -> None:
            super().__init__()
            self.counts = found[use] = [0, 0]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
            result = func(*args, **(kwargs or {}))
            if func in copies and result.shape == shape and result.dtype == torch.float32:
                self.counts[0] += any(part.dtype == torch.bfloat16 for part in args if isinstance(part, Tensor))
            if func.overloadpacket is torch.ops.aten.mm:
                self.counts[1] += result.dtype == torch.bfloat16
            return result

    with fake_devices("cuda", lambda: 2**40, 2**40) as mode, mode:
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        states = torch.empty(TOKENS, shape[1], dtype=torch.bfloat16, device=device, requires_grad=True)
        targets = torch.empty(TOKENS, dtype=torch.int64, device=device)
        shift = torch.empty(VOCABULARY, dtype=torch.bfloat16, device=device, requires_grad=True)
        head = HeadWeights(weight, shift)

        engine = InProcessEngine(origin, device, torch.bfloat16, Stops(frozenset({EOS})), float32_head=True)
        engine.update_weights(((name, part.to(device)) for name, part in named_parameters(model).items()), 0)
        engine._sampling = SamplingConfig()
        row = torch.zeros(4, dtype=torch.int64, device=device)
        with Uses("decoding"), torch.no_grad():
            kept = Recordings()
            for _ in range(2):
                predictor = engine._predictor(kept)
                predictor.draw(states[:4], RowState(row, row.clone(), row.clone(), row.clone(), None))

        for form, tokens in {"torch": {"chunk_tokens": 128}, "kernels": {"kernel_tokens": 128}}.items():
            spec = HeadSpec(float32_product=True, **tokens)
            with Uses(f"forward pass, {form}"):
                loss = score(states, head, targets, spec, entropy=True).logprobs.sum()
            with Uses(f"backward pass, {form}"):
                loss.backward()
            with Uses(f"loss in evaluation, {form}"), torch.no_grad():
                separable_loss(states, head, targets, lambda logprobs, *_: -logprobs, spec)
            with Uses(f"loss with gradients, {form}"):
                separable_loss(states, head, targets, lambda logprobs, *_: -logprobs, spec)

        def ask(look: HeadObserver) -> None:
            look(HeadSpec(float32_product=True), states, head)

        compared, weights = Distillation(beta=0.0), torch.ones(TOKENS, device=device)
        with Uses("student and teacher in evaluation"), torch.no_grad():
            distilled(states, head, targets, weights, compared, HeadSpec(float32_product=True), ask)
        with Uses("student and teacher"):
            distilled(states, head, targets, weights, compared, HeadSpec(float32_product=True), ask)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
