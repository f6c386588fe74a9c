"""The value type of packed weights: planes, selections, joins and sizes keep every value."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edgepipe.spec.packed import GroupValues, Packed, concatenate, join_planes, requantise, split_planes
from edgepipe.spec.packed_form import CODEBOOKS, PackedForm
from tests.support.models.packed import EXACT, random_packed

OFFSETS: tuple[Literal["none", "zero", "zeros", "added"], ...] = ("none", "zero", "zeros", "added")


@st.composite
def packed_weights(draw: st.DrawFn, *, rows: int | None = None) -> Packed:
    """A weight of any form, also those that no file has, with awkward scales."""
    bits = draw(st.sampled_from([4, 5, 6, 8]))
    group = draw(st.sampled_from([16, 32, 64]))
    span = draw(st.sampled_from([0, 2 * group]))
    offset = draw(st.sampled_from(OFFSETS))
    shape = (draw(st.integers(1, 5)) if rows is None else rows, 2 * group * draw(st.integers(1, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    codebook = "e2m1" if bits == 4 and offset == "none" and draw(st.booleans()) else ""
    ordered = draw(st.booleans())
    low, high = split_planes(rng.integers(0, 1 << bits, shape, dtype=np.uint8), bits)
    groups, dtype = (shape[0], shape[1] // group), draw(st.sampled_from([np.float16, np.float32]))

    def values() -> GroupValues:
        base = rng.normal(0, 0.02, (shape[0], shape[1] // (span or group))).astype(dtype)
        return GroupValues(base=base, factor=rng.integers(0, 64, groups, dtype=np.uint8) if span else None)

    zeros = {"zero": 1 << (bits - 1), "zeros": rng.integers(0, 16, groups, dtype=np.uint8)}
    return Packed(
        name="w",
        shape=shape,
        form=PackedForm(
            bits=bits,
            group=group,
            span=span,
            base_bits=8 * np.dtype(dtype).itemsize,
            offset=offset,
            codebook=codebook,
            ordered=ordered,
        ),
        low=low,
        high=high,
        scale=values(),
        offset=values() if offset == "added" else None,
        zero=zeros.get(offset),
        order=rng.permutation(shape[1]).astype(np.int32) if ordered else None,
    )


@settings(max_examples=40)
@given(st.data(), st.sampled_from([4, 5, 6, 8]))
def test_planes_hold_every_code(data: st.DataObject, bits: int) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 9).map(lambda eighths: 8 * eighths)))
    codes = data.draw(arrays.arrays(np.uint8, shape, elements=st.integers(0, (1 << bits) - 1)))
    low, high = split_planes(codes, bits)
    assert low.shape == (shape[0], shape[1] // 2)
    assert (high is None) == (bits == 4)
    assert high is None or high.shape == (shape[0], shape[1] * (bits - 4) // 8)
    assert (join_planes(low, high, bits) == codes).all()


@settings(max_examples=40)
@given(st.sampled_from([4, 5, 6, 8]), st.integers(0, 63))
def test_planes_have_the_documented_layout(bits: int, index: int) -> None:
    codes = np.zeros((1, 64), np.uint8)
    codes[0, index] = (1 << bits) - 1
    low, high = split_planes(codes, bits)
    assert low[0, index // 2] == (0xF0 if index % 2 else 0x0F)
    if high is not None:
        stream = int.from_bytes(high.tobytes(), "little")
        assert stream == ((1 << (bits - 4)) - 1) << (index * (bits - 4))


@settings(max_examples=40)
@given(packed_weights())
def test_a_form_knows_the_bytes_of_its_weights(weight: Packed) -> None:
    assert weight.num_bytes == weight.form.num_bytes(weight.shape)


@settings(max_examples=12)
@given(packed_weights())
def test_values_follow_the_definition(weight: Packed) -> None:
    scale, offset, zeros, codes = weight.scale.float32(), weight.offset, weight.zeros(), weight.codes()
    group = weight.form.group
    expected = np.empty(weight.shape, np.float32)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            code = codes[row, column]
            level = CODEBOOKS["e2m1"][code] if weight.form.codebook else np.float32(code)
            if zeros is not None:
                level = level - np.float32(zeros[row, column // group])
            value = scale[row, column // group] * level
            if offset is not None:
                value += offset.float32()[row, column // group]
            expected[row, column if weight.order is None else weight.order[column]] = value
    assert np.array_equal(weight.float32(), expected)


@settings(max_examples=40)
@given(packed_weights(), st.data())
def test_rows_are_the_rows_of_the_values(weight: Packed, data: st.DataObject) -> None:
    count = weight.shape[0]
    start, stop = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    indices = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6)))
    assert np.array_equal(weight.rows(slice(start, stop)).float32(), weight.float32()[start:stop])
    assert np.array_equal(weight.rows(indices).float32(), weight.float32()[indices])


@settings(max_examples=40)
@given(packed_weights(), st.data())
def test_parts_join_to_the_whole(weight: Packed, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, weight.shape[0]))
    joined = concatenate([weight.rows(slice(0, cut)), weight.rows(slice(cut, None))])
    assert joined.shape == weight.shape
    assert np.array_equal(joined.float32(), weight.float32())
    assert joined.num_bytes == weight.num_bytes


def test_parts_with_zero_points_of_their_own_keep_them() -> None:
    rng = np.random.default_rng(0)
    whole = replace(
        requantise("w", rng.normal(0, 1, (2, 64)).astype(np.float32)), form=PackedForm(bits=8, group=32, offset="zeros")
    )
    zeros = [np.array([[128, 3]], np.uint8), np.array([[7, 128]], np.uint8)]
    for first, second in ((128, 7), (128, zeros[1]), (zeros[0], 7), (zeros[0], zeros[1])):
        parts = [replace(whole.rows(slice(0, 1)), zero=first), replace(whole.rows(slice(1, 2)), zero=second)]
        joined = concatenate(parts).float32()
        assert np.array_equal(joined, np.concatenate([part.float32() for part in parts]))


def test_different_forms_do_not_join() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="another form"):
        concatenate([random_packed("Q4_K", (2, 256), rng), random_packed("Q6_K", (2, 256), rng)])


@settings(max_examples=50)
@given(packed_weights(rows=2), packed_weights(rows=2))
def test_different_orders_of_columns_do_not_join(first: Packed, other: Packed) -> None:
    same = first.form == other.form and first.shape == other.shape
    if not (same and first.order is not None and other.order is not None):
        return
    if not np.array_equal(first.order, other.order):
        with pytest.raises(ValueError, match="order of columns"):
            concatenate([first, other])


@pytest.mark.parametrize("scheme", EXACT)
def test_a_large_weight_is_widened_in_chunks(scheme: str) -> None:
    weight = random_packed(scheme, (300, 4096), np.random.default_rng(1))  # more values than one chunk
    rows = np.array([0, 255, 256, 299])
    assert np.array_equal(weight.float32()[rows], weight.rows(rows).float32())


@given(st.integers(0, 1 << 32), st.sampled_from([32, 64]), st.floats(1e-3, 1e3))
def test_requantising_loses_half_a_level_at_most(seed: int, group: int, spread: float) -> None:
    values = np.random.default_rng(seed).normal(0, spread, (3, 4 * group)).astype(np.float32)
    packed = requantise("w", values, group=group)
    step = np.abs(values).reshape(3, -1, group).max(axis=2).repeat(group, axis=1) / 127
    assert (np.abs(packed.float32() - values) <= 0.57 * step).all()  # half a level, and the scale's rounding
    assert packed.num_bytes == packed.form.num_bytes(packed.shape)


def test_requantising_keeps_zero_groups_zero() -> None:
    assert not requantise("w", np.zeros((2, 64), np.float32)).float32().any()
