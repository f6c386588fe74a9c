"""Tiles give what plain products give, whatever the sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch.cpu.linear import HalfLinear, TiledLinear, half_works, tile_width  # noqa: E402
from edgepipe_torch.layers.linear import Linear, PlainLinear, Workspace  # noqa: E402

CPU = torch.device("cpu")
FEATURES = st.integers(1, 300)
KINDS = st.sampled_from([TiledLinear, HalfLinear] if half_works() else [TiledLinear])


def pair(
    in_features: int, parts: Sequence[int], *, bias: bool, kind: type[TiledLinear | HalfLinear] = TiledLinear
) -> tuple[TiledLinear | HalfLinear, PlainLinear]:
    """The same random weight, exact in bf16, in two layouts."""
    packed = kind("test", in_features, parts, Workspace(torch.float32, CPU))
    plain = PlainLinear(in_features, parts, dtype=torch.float32, device=CPU)
    both: tuple[Linear, Linear] = (packed, plain)
    for index, size in enumerate(parts):
        weight, offset = torch.randn(size, in_features).bfloat16().float(), torch.randn(size)
        for linear in both:
            linear.fill(index, weight)
            if bias:
                linear.fill_bias(index, offset)
    for linear in both:
        linear.finish()
    return packed, plain


@settings(deadline=None, max_examples=40)
@given(KINDS, st.integers(1, 70), st.integers(1, 40), st.lists(FEATURES, min_size=1, max_size=3), st.booleans())
def test_rows_and_sums(
    kind: type[TiledLinear | HalfLinear], num_rows: int, in_features: int, parts: list[int], bias: bool
) -> None:
    tiled, plain = pair(in_features, parts, bias=bias, kind=kind)
    x, total = torch.randn(num_rows, in_features), torch.randn(num_rows, sum(parts))
    expected = plain.rows(x)
    torch.testing.assert_close(tiled.rows(x), expected, rtol=1e-4, atol=1e-4)
    summed = total.clone()
    tiled.add_to(x, summed)
    torch.testing.assert_close(summed, total + expected, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=30)
@given(KINDS, st.integers(1, 70), st.integers(1, 40), FEATURES, st.booleans())
def test_swiglu(kind: type[TiledLinear | HalfLinear], num_rows: int, in_features: int, inner: int, bias: bool) -> None:
    tiled, plain = pair(in_features, [inner, inner], bias=bias, kind=kind)
    x = torch.randn(num_rows, in_features)
    torch.testing.assert_close(tiled.swiglu(x), plain.swiglu(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [97, 211, 131 * 3, 480])
def test_a_tied_head_gives_its_rows_as_embedding(vocabulary: int) -> None:
    tiled, plain = pair(20, [vocabulary], bias=False)
    assert isinstance(tiled, TiledLinear)
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


@pytest.mark.skipif(not half_works(), reason="no fp16 kernel here")
def test_a_weight_that_fp16_cannot_hold_stays_float32() -> None:
    half = HalfLinear("test", 2, [1], Workspace(torch.float32, CPU))
    half.fill(0, torch.tensor([[1e5, 1.0]]))
    half.finish()
    assert half.rows(torch.ones(1, 2)).item() == 100_001.0


def test_fp16_loses_less_than_summing_in_float32_does() -> None:
    weight = (torch.randn(64, 4096) * 10.0 ** torch.randint(-9, 1, (64, 4096))).bfloat16().float()
    x = torch.randn(3, 4096)
    exact = x.double() @ weight.t().double()
    by_rounding_weights = (x.double() @ weight.half().t().double() - exact).abs().max()
    by_summing = (x @ weight.t() - exact).abs().max()
    assert by_rounding_weights < by_summing
