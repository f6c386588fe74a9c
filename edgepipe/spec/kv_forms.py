"""Forms of KV besides the compute dtype: codes and their scales, one set for each vector of keys or values.

A vector is a head's key or value of one token (D values); see ``Attention.kv_vectors``.
"""

from __future__ import annotations

from math import gcd, lcm
from typing import NamedTuple

from edgepipe.errors import ConfigInvalid

KV_8BIT = "8bit"
"""KV as int8 codes with a float16 scale for each vector."""

KV_4BIT = "4bit"
"""KV as 4-bit codes of the rotated vector, with a scale of one byte for each group of 32 values.

The newest tokens of a sequence have 8-bit codes: see ``SPAN_TOKENS``.
"""

SPAN_TOKENS = 32
"""Tokens of a span, which begins at a multiple of this. With ``KV_4BIT`` a token reads its own span with 8 bits."""

REST_TOKENS = 48
"""How many slots behind a token's own one the lower 4 bits of its 8 lie, until codes of later tokens take that slot.

More than a span: a row with up to 16 rejected drafts leaves the lower bits of the span before it as they are.
"""

LARGEST_BLOCK = 256
"""Tokens of the largest block that a device prefers: a CUDA page. Plans do not know a device's blocks."""

KV_FORMS = (KV_8BIT, KV_4BIT)
"""All forms, the widest first."""

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SCALE_BYTES = 2  # scale of a vector kept in 8 bits
_GROUP = 32
_LEAST_GROUP = 4


class FourBits(NamedTuple):
    """How a vector of one size is kept in 4 bits."""

    group: int  # neighbouring values that share a scale: 32, or fewer where the size is no multiple of that
    block: int  # neighbouring values that a Hadamard matrix mixes before they are rounded


def four_bits(head_dim: int, value_width: int = 0) -> FourBits:
    """Return how vectors of ``head_dim`` values are kept in 4 bits.

    value_width  leading values of a key that are its value, which no block and no group may cut; 0: values are apart

    Raises ConfigInvalid for sizes that are no multiple of 4.
    """
    common = gcd(head_dim, value_width)
    block = common & -common  # the largest power of two that divides it
    if block < _LEAST_GROUP:
        size = f"{head_dim} values, of which {value_width} are the value," if value_width else f"{head_dim} values"
        raise ConfigInvalid(
            f"this model's KV cannot be kept as {KV_4BIT}",
            fact=f"its heads have {size} and not a multiple of {_LEAST_GROUP}",
            next_step=f"give --kv {KV_8BIT}",
        )
    return FourBits(min(block, _GROUP), block)


def span_tokens(form: str, block_size: int) -> int:
    """Return the tokens of a span whose newest one is read with 8 bits; 0 for a form without such spans.

    Spans divide blocks, so that a sequence which begins behind cached blocks begins with a span.
    """
    return gcd(SPAN_TOKENS, block_size) if form == KV_4BIT else 0


def block_tokens(form: str, size: int) -> int:
    """Return the tokens per KV block of a form on devices that prefer blocks of ``size``: whole spans."""
    return lcm(size, SPAN_TOKENS) if form == KV_4BIT else size


def rest_tokens(form: str) -> int:
    """Return how many slots a sequence needs behind its last token's."""
    return REST_TOKENS if form == KV_4BIT else 0


def slots_of_chat(num_tokens: int, form: str, block_size: int = LARGEST_BLOCK) -> int:
    """Return the slots of one chat of ``num_tokens``; in whole blocks if its form needs some behind them."""
    if not num_tokens or not rest_tokens(form):
        return num_tokens
    return -(-(num_tokens + rest_tokens(form)) // block_size) * block_size


def pages_fit(head_dim: int, out_dim: int, form: str = "") -> bool:
    """Return whether CUDA's own kernel attends over pages with keys of so many values, and outputs of ``out_dim``.

    form  of ``KV_FORMS``; empty: a dtype
    """
    fits = head_dim % _GROUP == 0 and (out_dim == 64 or out_dim % 128 == 0)
    return fits and (form != KV_4BIT or out_dim & (out_dim - 1) == 0)  # a lane's codes of a value lie in one group


def vector_bytes(form: str, head_dim: int, value_width: int = 0) -> int:
    """Return the bytes of a vector of ``head_dim`` values.

    form         the dtype of the values ("float32" | "float16" | "bfloat16"), or one of ``KV_FORMS``
    value_width  see ``four_bits``

    Raises ConfigInvalid for another form, and for sizes that a form does not have.
    """
    if form == KV_8BIT:
        return head_dim + _SCALE_BYTES
    if form == KV_4BIT:
        return head_dim // 2 + head_dim // four_bits(head_dim, value_width).group
    if form not in _DTYPE_BYTES:
        known = ", ".join((*_DTYPE_BYTES, *KV_FORMS))
        raise ConfigInvalid(f"KV cannot be kept as '{form}'", fact=f"it can be {known}")
    return head_dim * _DTYPE_BYTES[form]
