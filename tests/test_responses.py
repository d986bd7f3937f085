"""What the readers of JSON answers say of a value that they refuse."""

from __future__ import annotations

import pytest

from holdfast.http import EndpointMistaken
from holdfast.responses import Field


def test_a_name_in_the_path_of_a_value_is_cut() -> None:
    field = Field("/route", {"x" * 9999: 3}).key("x" * 9999)

    with pytest.raises(EndpointMistaken) as error:
        field.text()

    assert str(error.value) == f"answers /route with {'x' * 57}... 3, where a text is needed"
