"""Bytes of keys and values in each form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import ConfigInvalid
from edgepipe.spec.kv_forms import KV_FORMS, four_bits, vector_bytes
from edgepipe.testing.tiny_model import tiny_config


@pytest.mark.parametrize(
    ("head_dim", "value_width", "expected"),
    [
        (64, 0, 32 + 2),
        (128, 0, 64 + 4),
        (256, 0, 128 + 8),
        (96, 0, 48 + 3),
        (80, 0, 40 + 5),  # groups of 16
        (72, 0, 36 + 9),  # groups of 8
        (576, 512, 288 + 18),  # a latent and a rotating key
        (72, 56, 36 + 9),
        (36, 32, 18 + 9),  # groups of 4
    ],
)
def test_4_bits_take_half_a_byte_per_value_and_a_byte_per_group(head_dim: int, value_width: int, expected: int) -> None:
    assert vector_bytes("4bit", head_dim, value_width) == expected


@given(units=st.integers(1, 160), value_units=st.integers(0, 160))
def test_no_group_and_no_block_is_cut(units: int, value_units: int) -> None:
    head_dim, value_width = 4 * units, 4 * min(value_units, units)
    form = four_bits(head_dim, value_width)
    for size in form:
        assert head_dim % size == value_width % size == 0
        assert size & (size - 1) == 0
    assert form.group == min(32, form.block)
    rest = head_dim // form.block % 2 or value_width // form.block % 2
    assert rest, "the block is the largest of its kind"


@pytest.mark.parametrize("head_dim", [7, 10, 22, 26])
def test_heads_of_other_sizes_are_refused_with_what_to_type(head_dim: int) -> None:
    config = tiny_config(head_dim=head_dim)
    assert config.keeps_kv_as("8bit")
    assert not config.keeps_kv_as("4bit")
    with pytest.raises(ConfigInvalid, match="cannot be kept as 4bit") as caught:
        config.kv_bytes_per_token(form="4bit")
    assert f"{head_dim} values" in caught.value.fact
    assert "--kv 8bit" in caught.value.next_step


def test_each_form_takes_less_than_the_one_before() -> None:
    config = tiny_config(head_dim=64)
    sizes = [config.kv_bytes_per_token(form=form) for form in ("float32", "bfloat16", *KV_FORMS)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.27 * sizes[1]


def test_an_unknown_form_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigInvalid, match="KV cannot be kept as '2bit'") as caught:
        vector_bytes("2bit", 64)
    assert caught.value.fact == "it can be float32, float16, bfloat16, 8bit, 4bit"
