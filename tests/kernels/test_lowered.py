"""Blocks that inductor lowers for an H100 that is not here take the launches and bytes that are counted by hand."""

from __future__ import annotations

import pytest

from holdfast.models.chunks.kernel_form import why_no_triton
from tests.kernels.lowered import LENGTH, MODELS
from tests.kernels.outside import lines_of

if why_no_triton():
    pytest.skip("needs Triton: make test-kernels", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Row = tuple[int, int, float, float]
"""Graphs, launches, MB of Triton kernels, MB of all launches."""
PRODUCTS = 7
SUMS = 4
"""Sums of partial gradients: of the weights of two norms, rounded after it; of the four norms of Gemma, not rounded."""
LAUNCHES = {
    # Norm; queries and keys rotated; residual and norm; gate; residual, of Gemma with a norm before it.
    **dict.fromkeys([(kind, "forward") for kind in MODELS], PRODUCTS + 1 + 6),
    # Gate; residual and norm; queries and keys rotated; gradients of norms; gradient of the input.
    ("llama", "backward"): 2 * PRODUCTS + 1 + 6 + SUMS,
    # Besides, gradients of three biases, in two stages each.
    ("qwen2", "backward"): 2 * PRODUCTS + 1 + 6 + 3 * 2 + SUMS,
    # Besides, a norm after the branch, a copy of the values' gradients, and the last sums of four norms.
    ("gemma2", "backward"): 2 * PRODUCTS + 1 + 6 + 2 + 4 + SUMS,
}
"""Products, attention, Triton kernels, and sums that are torch's own."""
WIDE = {
    # Norm 2, residual and norm 3, residual 4.
    **dict.fromkeys([(kind, "forward") for kind in MODELS], 2 + 3 + 4),
    # Residual and norm 6, gradients of norms 7, gradient of the input 6.
    ("qwen2", "backward"): 6 + 7 + 6,
    ("llama", "backward"): 6 + 7 + 6,
    # A norm after the branch 3, two norms and a residual 8, gradients of four norms 11, gradient of the input 8.
    ("gemma2", "backward"): 3 + 8 + 11 + 8,
}
"""Tensors as wide as the model's states that norms and residuals read or write."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Row]:
    found = {}
    for line in lines_of("lowered", tmp_path_factory.mktemp("lowered"))[2:]:
        cells = [cell.strip().replace(",", "") for cell in line.split("|")[1:-1]]
        kind, _, name, graphs, launches, _, fused, whole = cells
        found[kind, name] = int(graphs), int(launches), float(fused), float(whole)
    return found


def by_hand(kind: str, name: str) -> tuple[float, float]:
    """Return the megabytes of bfloat16 that kernels read and write, and those of products and attention with them."""
    count, widths = MODELS[kind]
    hidden, ffn, heads, key_heads = (
        widths[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    size = widths.get("head_dim", hidden // heads)
    queries, keys = heads * size, key_heads * size
    rotated = 2 * queries + 2 * keys + 4 * size  # with cosines and sines, read for each
    gate = 3 * ffn  # gate, up, their product
    extra = 0
    if name == "backward":
        gate = 5 * ffn  # the product's gradient, gate and up, and the gradients of these
        # Of biases, the gradients are read again; Gemma's values are copied.
        extra = {"qwen2": queries + 2 * keys, "llama": 0, "gemma2": 2 * keys}[kind]
    tokens = count * LENGTH
    kernels = tokens * (WIDE[kind, name] * hidden + gate + rotated + extra)
    matrices = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden), *[(hidden, ffn)] * 3]
    products = sum(tokens * (into + out) + into * out for into, out in matrices)
    if name == "forward":
        attention = tokens * (2 * queries + 2 * keys)
    else:
        products *= 2  # one for the gradient of the input, one for that of the matrix
        # Gradients of three and of the output, what they are of; our operation computes its output again.
        attention = tokens * ((3 if kind == "gemma2" else 4) * queries + 4 * keys)
    return 2 * kernels / 1e6, 2 * (kernels + products + attention) / 1e6


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_block_is_one_graph_of_the_launches_and_bytes_that_are_counted_by_hand(
    rows: dict[tuple[str, str], Row], kind: str, name: str
) -> None:
    graphs, launches, fused, whole = rows[kind, name]

    assert graphs == 1
    assert launches == LAUNCHES[kind, name]
    assert (fused, whole) == pytest.approx(by_hand(kind, name), rel=0.02)
