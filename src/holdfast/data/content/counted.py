"""Sentences about what happened to rows during tokenisation, by the names in `Tokenised.counts`."""

from __future__ import annotations

from collections.abc import Mapping

DROPPED_ROLES = {
    "system": "a system message",
    "user": "a user's message",
    "developer": "a developer's message",
    "tool": "a tool's result",
    "role": "a message of another role",
}
"""Roles whose messages a chat template may leave out; such messages are counted as `ROLE_dropped`."""

TEMPLATE = {
    "no_end_of_turn": "answers that the chat template does not close, so that a model does not learn to stop",
    **{
        f"{role}_dropped": f"rows with {description} that the chat template leaves out"
        for role, description in DROPPED_ROLES.items()
    },
}
"""What a chat template does that nobody expects of it."""

_LOST = {
    "overlong_dropped": "left out as longer than data.max_length={limit} has room for",
    "untrained": "without a trained token within data.max_length={limit}",
    "bad_rows": "that cannot be read",
}


def unexpected(counts: Mapping[str, float]) -> list[str]:
    """Return what a chat template does to rows and nobody expects, a sentence for each."""
    return [f"{counts[name]:.0f} {sentence}" for name, sentence in TEMPLATE.items() if counts.get(name)]


def lost_rows(counts: Mapping[str, int], limit: int) -> str:
    """Return how many rows are not trained on, and why; "" where none was lost."""
    return ", ".join(
        f"{counts[name]} {reason.format(limit=limit)}" for name, reason in _LOST.items() if counts.get(name)
    )
