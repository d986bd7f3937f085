"""Tensors that are no plain rows of numbers: some come back bit for bit, the others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import checkpoint
from holdfast.checkpoint.format.unsupported_tensors import is_finite
from holdfast.errors import ModelError

BYTES = torch.arange(16, dtype=torch.uint8).reshape(4, 4)
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
COMPLEX = torch.view_as_complex(torch.arange(12.0, dtype=torch.float64).reshape(2, 3, 2))


def beside(tensor: Tensor | None) -> nn.Module:
    """Return a layer with a tensor beside it."""
    layer = nn.Linear(3, 3)
    layer.register_buffer("odd", tensor)
    return layer


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


def emptied(tensor: Tensor) -> Tensor:
    """Return a tensor of its form whose bits are all zero."""
    return tensor.contiguous().clone().flatten().view(torch.uint8).zero_().view(tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize(
    "tensor",
    [
        *(pytest.param(BYTES.view(dtype), id=str(dtype)) for dtype in FLOAT8),
        pytest.param(BYTES.view(torch.float4_e2m1fn_x2), id="float4"),
        pytest.param(COMPLEX.to(torch.complex64), id="complex64"),
        pytest.param(COMPLEX, id="complex128"),
        pytest.param(torch.zeros(0, 3), id="no elements"),
        pytest.param(torch.arange(12.0).reshape(3, 4).t(), id="transposed"),
        pytest.param(torch.tensor([2**63 + 1], dtype=torch.uint64), id="uint64"),
    ],
)
def test_an_odd_but_plain_tensor_comes_back_bit_for_bit(tmp_path: Path, tensor: Tensor) -> None:
    run = tmp_path / "a run \u00fc"
    path = str(run / "step-00000001")
    other = beside(emptied(tensor))

    checkpoint.rehearse(str(run), beside(tensor))
    checkpoint.save(path, beside(tensor))
    checkpoint.load(path, other)

    found: Any = other.odd
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert bits(found) == bits(tensor)
    assert checkpoint.verify(path).finite


@pytest.mark.parametrize(("dtype", "code"), [*zip(FLOAT8, (0x7F, 0x7C, 0x80, 0x80, 0xFF), strict=True)])
def test_one_byte_that_is_no_number_makes_a_checkpoint_not_finite(
    tmp_path: Path, dtype: torch.dtype, code: int
) -> None:
    """NaN, or the infinity of e5m2, as the OCP 8-bit and microscaling formats and their fnuz variants write them."""
    assert is_finite(BYTES.view(dtype))
    spoiled = BYTES.clone()
    spoiled[3, 1] = code

    checkpoint.save(str(tmp_path / "step-00000001"), beside(spoiled.view(dtype)))

    assert not checkpoint.verify(str(tmp_path / "step-00000001")).finite


def test_a_complex_tensor_with_a_nan_is_not_finite() -> None:
    assert not is_finite(torch.tensor([1j, complex(0, float("nan"))]))
    assert is_finite(torch.tensor([1j, 2 + 3j]))


class Remembering(nn.Linear):
    """Adds to its state dict what is no tensor."""

    def get_extra_state(self) -> Any:
        return {"scale": 3}

    def set_extra_state(self, state: Any) -> None:
        self.state = state


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: beside(torch.ones(1, 4).expand(3, 4)), "odd is expanded, so that several elements are one number"),
    (lambda: beside(torch.eye(3).to_sparse()), "odd is stored as sparse_coo"),
    (lambda: beside(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)), "odd is stored as qint8"),
    (lambda: beside(torch.ones(3, device="meta")), "odd is on the meta device and has no numbers"),
    (lambda: beside(torch.ones(3, dtype=torch.complex64).conj()), "odd is a lazy conjugate of other memory"),
    (lambda: nn.Sequential(nn.LazyLinear(3)), "0.weight has no shape yet, being lazy"),
    (lambda: nn.Sequential(Remembering(3, 3)), "0._extra_state is extra state of a module"),
]


@pytest.mark.filterwarnings("ignore")  # torch says that quantised tensors and lazy modules may change
@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_could_not_come_back_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, make: Callable[[], nn.Module], words: str
) -> None:
    path = str(tmp_path / "step-00000001")
    model = make()

    for call in (lambda: checkpoint.save(path, model), lambda: checkpoint.rehearse(str(tmp_path), model)):
        with pytest.raises(ModelError, match="The model cannot be saved: ") as caught:
            call()
        assert words in str(caught.value)

    assert list(tmp_path.iterdir()) == []


def test_a_load_into_memory_that_is_shared_changes_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "step-00000001")
    checkpoint.save(path, beside(torch.zeros(3, 4)))
    model = beside(torch.ones(1, 4).expand(3, 4))
    before = [bits(tensor) for tensor in model.state_dict().values()]

    with pytest.raises(ModelError, match="odd is expanded"):
        checkpoint.load(path, model)

    assert [bits(tensor) for tensor in model.state_dict().values()] == before
