"""Bound the digits of JSON numbers in bound answers, as JavaScript writes numbers. PURE.

llguidance bounds the digits of a number only if the schema has a range, and those of a fraction never. A small model
may then write digits until ``max_tokens``. So the mask of a state within a long number loses the tokens that begin
with a digit. Enumerations, ranges and patterns of strings keep their own digits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_WHOLE_DIGITS = 21  # JavaScript writes numbers below 1e21 without exponent; 64-bit integers have up to 20 digits
MAX_SIGNIFICANT_DIGITS = 17  # digits of a double, in numbers with a fraction
MAX_FRACTION_DIGITS = 22  # 0.0000012345678901234567 has so many: smaller numbers have an exponent
MAX_EXPONENT_DIGITS = 3
TAIL_BYTES = 64  # end of the output that is kept: longer than any number within the bounds

_NUMBER = re.compile(rb"-?([0-9]+)(?:\.([0-9]*))?([eE][+-]?[0-9]*)?\Z")
_IN_TEXT = re.compile(rb"[\"\\\w.+-]")  # characters before digits that do not begin a JSON number
_DIGITS = b"0123456789"
_OF_TEXT = b'q"'  # allowed within texts and at their ends, never within a number


class NumberBounds:
    """Knows which tokens of a vocabulary continue a number."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """``tokens``: [V] bytes of each id."""
        ids = {token: index for index, token in enumerate(tokens) if len(token) == 1}
        self._digits = [ids[bytes([digit])] for digit in _DIGITS if bytes([digit]) in ids]
        self._of_text = [ids[bytes([byte])] for byte in _OF_TEXT if bytes([byte]) in ids]
        begins = np.zeros(-(-len(tokens) // 32) * 32, np.uint8)
        begins[[index for index, token in enumerate(tokens) if token[:1] in _DIGITS and token]] = 1
        self._no_digit = ~np.packbits(begins, bitorder="little").view(np.int32)

    def bounded(self, mask: npt.NDArray[np.int32], tail: bytes) -> npt.NDArray[np.int32]:
        """Return the mask after an output that ends with ``tail``, without digits if its number is long enough.

        mask  [ceil(V / 32)]: bit ``i`` of word ``w`` allows token ``32 * w + i``
        """
        if not is_long(tail) or not self._is_in_number(mask):
            return mask
        fewer = mask & self._no_digit
        return fewer if fewer.any() else mask

    def _is_in_number(self, mask: npt.NDArray[np.int32]) -> bool:
        """Return whether a mask allows every digit and nothing that only texts have."""
        return all(_has(mask, token) for token in self._digits) and not any(
            _has(mask, token) for token in self._of_text
        )


def is_long(tail: bytes) -> bool:
    """Return whether an output ends with a number that may have no further digits."""
    if tail[-1:] not in _DIGITS or (found := _NUMBER.search(tail)) is None:
        return False
    if _IN_TEXT.match(tail[found.start() - 1 : found.start()] if found.start() else b""):
        return False
    whole, fraction, exponent = found.groups()
    if exponent is not None:
        return len(exponent.lstrip(b"eE+-")) >= MAX_EXPONENT_DIGITS
    if fraction is None:
        return len(whole) >= MAX_WHOLE_DIGITS
    return len(fraction) >= MAX_FRACTION_DIGITS or len((whole + fraction).lstrip(b"0")) >= MAX_SIGNIFICANT_DIGITS


def _has(mask: npt.NDArray[np.int32], token: int) -> bool:
    return bool((int(mask[token // 32]) >> (token % 32)) & 1)
