"""What trackers show of a completion."""

from __future__ import annotations

from holdfast.features.trackers.content import completions_of


def test_of_a_text_beyond_a_thousand_characters_the_end_is_shown() -> None:
    (row,) = completions_of([{"step": 3, "prompt": "a" + "b" * 1000, "completion": "c" * 1000, "reward": 1}])

    assert row == {"step": 3, "prompt": "..." + "b" * 997, "completion": "c" * 1000, "reward": 1.0}
