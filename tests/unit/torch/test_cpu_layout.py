"""The planes of codes that CPU kernels read, and how rows are split among their functions."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from edgepipe_torch.cpu.kinds import Kind
from edgepipe_torch.cpu.layout import codes_of, planes_of
from edgepipe_torch.cpu.product_code import ProductCode
from edgepipe_torch.cpu.row_parts import parts_of


@given(st.sampled_from([5, 6, 8]), st.integers(1, 20), st.integers(1, 5), st.integers(0, 1000))
def test_planes_hold_all_codes_in_the_codes_bytes(bits: Literal[5, 6, 8], rows: int, units: int, seed: int) -> None:
    kind = Kind(bits=bits)
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 16 * units), np.uint8)
    low, high = planes_of(kind, codes)
    np.testing.assert_array_equal(codes_of(kind, low, high), codes)
    assert low.nbytes + (0 if high is None else high.nbytes) == codes.size * bits // 8


@pytest.mark.parametrize(
    ("bits", "whole"),
    [
        (5, [(0, 6), (6, 6), (12, 3)]),  # the first code in a word, and how many there are
        (6, [(0, 5), (5, 5), (10, 5)]),
    ],
)
def test_codes_lie_one_after_the_other_in_their_words(bits: Literal[5, 6], whole: list[tuple[int, int]]) -> None:
    codes = np.arange(16, dtype=np.uint8)[None] + np.uint8(3)
    low, high = planes_of(Kind(bits=bits), codes)
    assert high is not None
    words = [int(low[0, 0]), int(low[0, 1]), int(high[0, 0])]
    for word, (first, count) in zip(words, whole, strict=True):
        found = [word >> (bits * index) & ((1 << bits) - 1) for index in range(count)]
        assert found == list(range(first + 3, first + count + 3))


@given(st.integers(1, 500), st.integers(1, 130))
def test_rows_are_split_evenly_into_as_few_parts_as_possible(rows: int, most: int) -> None:
    parts = parts_of(rows, most)
    assert sum(parts) == rows
    assert len(parts) == -(-rows // most)
    assert max(parts) <= most
    assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_a_product_of_a_few_rows_fetches_each_line_of_codes_ahead(bits: Literal[4, 5, 6, 8]) -> None:
    """Vectors of 16 floats read a line of codes each, or half of one."""
    text = ProductCode(Kind(bits=bits), width=16, most_rows=(8, 12)).module()
    for rows in (1, 8):
        tile = re.search(rf"@tile{rows}\(.*?\n}}\n", text, flags=re.DOTALL)
        assert tile is not None
        lines = len(re.findall(r"load <16 x i(16|32)>", tile[0]))
        assert tile[0].count("@llvm.prefetch") == lines > 0
