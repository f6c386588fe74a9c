"""Tiles give what plain products give, whatever the sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch.linear import Linear, PlainLinear, TiledLinear, Workspace, tile_width  # noqa: E402

CPU = torch.device("cpu")
FEATURES = st.integers(1, 300)


def pair(in_features: int, parts: Sequence[int], *, bias: bool) -> tuple[Linear, Linear]:
    """The same random weight in both layouts."""
    tiled = TiledLinear("test", in_features, parts, Workspace(torch.float32, CPU))
    plain = PlainLinear(in_features, parts, dtype=torch.float32, device=CPU)
    for index, size in enumerate(parts):
        weight, offset = torch.randn(size, in_features), torch.randn(size)
        for linear in (tiled, plain):
            linear.fill(index, weight)
            if bias:
                linear.fill_bias(index, offset)
    return tiled, plain


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 70), st.integers(1, 40), st.lists(FEATURES, min_size=1, max_size=3), st.booleans())
def test_rows_and_sums(num_rows: int, in_features: int, parts: list[int], bias: bool) -> None:
    tiled, plain = pair(in_features, parts, bias=bias)
    x, total = torch.randn(num_rows, in_features), torch.randn(num_rows, sum(parts))
    expected = plain.rows(x)
    torch.testing.assert_close(tiled.rows(x), expected, rtol=1e-4, atol=1e-4)
    summed = total.clone()
    tiled.add_to(x, summed)
    torch.testing.assert_close(summed, total + expected, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 70), st.integers(1, 40), FEATURES, st.booleans())
def test_swiglu(num_rows: int, in_features: int, inner: int, bias: bool) -> None:
    tiled, plain = pair(in_features, [inner, inner], bias=bias)
    x = torch.randn(num_rows, in_features)
    torch.testing.assert_close(tiled.swiglu(x), plain.swiglu(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [97, 211, 131 * 3, 480])
def test_a_tied_head_gives_its_rows_as_embedding(vocabulary: int) -> None:
    tiled, plain = pair(20, [vocabulary], bias=False)
    ids = torch.tensor([0, vocabulary - 1, 3, 3])
    torch.testing.assert_close(tiled.take(ids), plain.take(ids), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("parts", "width"),
    [([576, 192, 192], 48), ([1536, 1536], 48), ([4096], 32), ([11008, 11008], 32), ([50257], 48), ([97], 97)],
    ids=str,
)
def test_widths(parts: list[int], width: int) -> None:
    assert tile_width(parts) == width


def test_a_weight_is_held_once() -> None:
    tiled, plain = pair(64, [96, 48], bias=True)
    assert tiled.num_bytes == plain.num_bytes == 4 * (64 + 1) * 144
