"""What a step may return, and what is refused as no observation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.environments.base import Malformed, Observation, StepResult, result_of


@pytest.mark.parametrize("done", [True, np.True_, np.array(True), 1])
def test_a_truth_value_of_python_or_numpy_ends_an_episode(done: Any) -> None:
    result = result_of({"messages": "x", "done": done, "info": {"a": np.float32(0.5), "b": "c"}})

    assert result == StepResult(({"role": "user", "content": "x"},), 0.0, True, {"a": 0.5})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"done": "no"}, "done a str ('no')"),
        ({"done": None}, "done a NoneType (None)"),
        ({"done": 2}, "done a int (2)"),
        ({"done": np.array([True, False])}, "done a ndarray "),
        ({"info": 5}, "info a int (5)"),
        ({"info": None}, "info a NoneType (None)"),
        ({"reward": float("nan")}, "reward a float (nan)"),
    ],
)
def test_a_field_of_another_type_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Malformed) as raised:
        result_of(Observation("x", **fields))

    assert f"returned the {said}" in str(raised.value)
