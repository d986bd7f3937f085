"""What is known of an endpoint's tokenizer before step 1."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.config.sections.server import ServerConfig
from holdfast.features.served_models.client import Client
from holdfast.features.served_models.served import tokenizer_is_compared


class Words:
    """A tokenizer that makes the same tokens of every text."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def __len__(self) -> int:
        return 8

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002 - a tokenizer's
        return self.tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002 - a tokenizer's
        return "words"


class Endpoint(Client):
    """Makes of texts what it is told to, one after the other."""

    answers: list[list[int | None]]

    def tokens_of(self, text: str) -> list[int | None]:  # noqa: ARG002 - the server's
        return self.answers.pop(0)


@pytest.mark.parametrize(
    ("ours", "theirs", "compared"),
    [
        pytest.param([5, 6], [[None, 6], [None, 6]], True, id="both texts"),
        pytest.param([5, 6], [[None, 6], [None, None]], True, id="one text"),
        pytest.param([5, 6], [[None, None], [None, None]], False, id="no token has a name"),
        pytest.param([5], [], False, id="texts too short to be asked for"),
        pytest.param([], [], False, id="texts without tokens"),
    ],
)
def test_a_tokenizer_is_said_to_be_compared_only_where_it_was(
    ours: list[int], theirs: list[list[int | None]], compared: bool
) -> None:
    server = Endpoint.of(ServerConfig(url="http://127.0.0.1:9/v1", model="tiny"), "teacher")
    object.__setattr__(server, "answers", theirs)  # the class is frozen

    assert tokenizer_is_compared(server, Words(*ours), "teacher") is compared
