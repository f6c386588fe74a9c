"""A uniform number per (seed, choice, output position), equal on every machine and in every version.

A draw depends on nothing else, so recomputing a position (after a crash, on another stage, in another batch) gives the
same number. The generator is counter-based: splitmix64 (Steele, Lea, Flood 2014), whose state starts at a key made from
seed and choice and advances once per position.
"""

from __future__ import annotations

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: the step of splitmix64
_CHOICE_STEP = 0xD1342543DE82EF95  # odd, unrelated to the above: separates the choices' streams


def draw(seed: int, choice: int, position: int) -> float:
    """Return a uniform number in [0, 1), a multiple of 2**-53.

    seed      0 to 2**64 - 1, the request's
    choice    0-based index of the choice among the request's ``n``
    position  0-based index of the output token
    """
    key = _mix((_mix((seed + _GOLDEN) & _WORD) + (choice + 1) * _CHOICE_STEP) & _WORD)
    word = _mix((key + (position + 1) * _GOLDEN) & _WORD)
    return (word >> 11) * 2.0**-53


def _mix(word: int) -> int:
    """Apply splitmix64's finaliser: every input bit affects every output bit."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
