"""Forms of packed weights for the CPU's products: where their codes lie, and what their inputs are multiplied by.

A weight [O, I] lies in tiles of 16 outputs, so that a vector holds one input's codes of neighbouring outputs::

    low     [tiles, words, 16] int32    4 bits: 8 codes in a word, 8 bits: 4 codes; input j in bits j * bits and up
                                        5 and 6 bits: 2 words for each 16 inputs
    high    [tiles, I / 16, 16]         5 bits: int16, 6 bits: int32; none for 4 and 8 bits
    scale   [tiles, groups, 16] float16
    offset  [tiles, groups, 16] float16 (added forms only)

Of weights that are no codes but numbers, ``low`` [tiles, I, 16] has bfloat16, float16 or float32, without scales.

16 codes of 6 bits fill three words, the last of them in ``high``: five codes in each, from bit 0 up, and two bits of
the sixteenth code at bit 30. 16 codes of 5 bits fill two words, with six codes and two bits of the sixteenth in each,
and a half word with three codes and the fifth bit.

A code becomes a float by one mask and one conversion: it stays where it lies in its word, times two to its first bit.
``prepare`` has divided the input by that, which is exact. A code that ends at bit 31 is shifted instead, since its mask
would make negative numbers. Every group is summed in float32 and then multiplied by its scale. Zeros and offsets need
only the sum of the group's inputs.

Products of any number of rows add the same terms in the same order: a row's result has the same bits whichever rows
are beside it.

Codes of E2M1 (MXFP4) become bytes before, twice their values plus 12: by a table of 16 bytes where the CPU has an
instruction for it, else by arithmetic on whole words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TILE = 16  # outputs
LAST = 15  # place of the code of a split unit that is made of parts
E2M1_BYTES = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)  # twice the values of codes, plus E2M1_ZERO
E2M1_ZERO = 12
SUM_FACTOR, SCALE_FACTOR, ZERO, OFFSET_FACTOR, NUM_FACTORS = 16, 17, 18, 19, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the code of a product depends on."""

    bits: Literal[4, 5, 6, 8, 16, 32]
    added: bool = False  # an offset per group
    floats: bool = False  # codes are float8_e4m3fn
    e2m1: bool = False  # codes of 4 bits are E2M1, which kernels read as the bytes ``E2M1_BYTES``
    number: Literal["", "i16", "half", "float"] = ""  # values themselves, without scales; "i16": bfloat16

    @property
    def name(self) -> str:
        """Return a name for functions."""
        return f"b{self.bits}{'a' * self.added}{'f' * self.floats}{'e' * self.e2m1}{self.number}"

    @property
    def split(self) -> bool:
        """Whether units of 16 codes have parts in both planes."""
        return self.bits in (5, 6)

    @property
    def unit(self) -> int:
        """Blocks of 8 inputs whose codes fill whole words."""
        return 2 if self.split else 1

    @property
    def words(self) -> int:
        """Words of the first plane for a unit."""
        return 2 if self.split else self.bits // 4

    @property
    def high_bits(self) -> int:
        """Bits of the second plane's elements, of which each unit has one; 0 without a second plane."""
        return {5: 16, 6: 32}.get(self.bits, 0)

    @property
    def codes_per_word(self) -> int:
        """Codes that lie whole in a word."""
        return 32 // self.bits

    @property
    def gain_exponent(self) -> int:
        """Exponent of the power of two that float codes lack; the inputs bring it."""
        return 100 if self.floats else 0

    @property
    def scale_exponent(self) -> int:
        """Exponent of the power of two that the scales bring; both together are 120, the biases' difference."""
        return 20 if self.floats else 0


def code_place(kind: Kind, index: int) -> tuple[int, int]:
    """Return the word of input ``index`` of a unit (the last one is of ``high``) and its first bit there.

    The sixteenth code of a split unit lies in no single word.
    """
    word, position = divmod(index, kind.codes_per_word)
    return word, position * kind.bits


def part_place(kind: Kind, word: int) -> int:
    """Return the first bit of a word's part of the sixteenth code, which has two bits, or one behind 15 bits."""
    return 15 if kind.bits == 5 and word == kind.words else 30


def input_factor(kind: Kind, index: int) -> float:
    """Return what an input with ``i % 16 == index`` is multiplied by, except for the scale's exponent."""
    if kind.number:
        return 1.0
    if kind.floats:
        return 2.0**kind.gain_exponent
    if kind.split and index == LAST:
        return 1.0
    _word, first_bit = byte_place(index) if kind.e2m1 else code_place(kind, index % (8 * kind.unit))
    return 1.0 if first_bit + (8 if kind.e2m1 else kind.bits) == 32 else 2.0**-first_bit


def byte_place(index: int) -> tuple[int, int]:
    """Return where the byte of an E2M1 code lies: among those of even or of odd inputs, and its first bit there."""
    return index % 2, index % 8 // 2 * 8
