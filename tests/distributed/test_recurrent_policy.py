"""A policy with recurrent layers is sampled by our own decoding as transformers' `generate` samples it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.grpo_cases import prompts_of, settings, train
from tests.models.architectures import settings_of
from tests.tiny import tiny_directory

RATIO = "sampling/importance_sampling_ratio"


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_a_policy_with_recurrent_layers_is_sampled_as_by_generate(
    kind: str, ranks: int, pools: Any, tmp_path: Path
) -> None:
    directory = str(tiny_directory(tmp_path, kind, **settings_of(kind)))
    trees = {engine: settings(directory, rollout={"engine": engine}) for engine in ("inprocess", "transformers")}

    found, expected = (pools(ranks).run(train, tree, prompts_of(8))[0] for tree in trees.values())

    assert found["sampled"] == expected["sampled"]
    for line in found["lines"]:
        ratios = [value for name, value in line.items() if name.startswith(RATIO)]
        assert ratios
        np.testing.assert_allclose(ratios, 1.0, atol=1e-5)
    for name, value in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], value, rtol=1e-6, atol=1e-6)
