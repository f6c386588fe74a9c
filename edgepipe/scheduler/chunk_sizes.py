"""Sizes of chunks and steps that the choice of prompts compares. PURE."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgepipe.backend.cost import StepWork

MIN_CHUNK_TOKENS = 32
"""Smallest planned chunk: a smaller one costs a ring about as much."""

_FINER = 1.3  # factor between the numbers of chunks that are compared
_SMALL_CHUNKS = (256, 128, 64, 32)  # sizes that are compared, too: kernels for few tokens end at such edges
PRECISION = 16  # sizes are found within a sixteenth
_SIZES_PER_OCTAVE = (1.0, 1.25, 1.5, 1.75)  # sizes of steps that are compared, from ``MIN_CHUNK_TOKENS`` on


def leading_bits(count: int) -> int:
    """Return the count with its three leading bits, so that a choice holds for similar loads."""
    rest = max(0, count.bit_length() - 3)
    return count >> rest << rest


def next_leading_bits(count: int) -> int:
    """Return the least number above the count that has four leading bits, so that a choice holds up to there."""
    rest = max(0, count.bit_length() - 4)
    return ((count >> rest) + 1) << rest


def chunk_counts(total: int, most: int) -> list[int]:
    """Return numbers of chunks, ascending, for ``total`` tokens in chunks of at most ``most``."""
    numbers = [-(-total // most)]
    while (number := max(numbers[-1] + 1, int(numbers[-1] * _FINER))) * _SMALL_CHUNKS[0] <= total:
        numbers.append(number)
    return numbers + [number for size in _SMALL_CHUNKS if (number := -(-total // size)) > numbers[-1]]


def step_sizes(most: int) -> list[int]:
    """Return sizes of steps, ascending: multiples of 8, since kernels work in tiles."""
    sizes, octave = [min(MIN_CHUNK_TOKENS, most)], MIN_CHUNK_TOKENS
    while octave <= most:
        sizes += [size for part in _SIZES_PER_OCTAVE if sizes[-1] < (size := int(part * octave)) <= most]
        octave *= 2
    return sizes


def largest_chunk(slices: Sequence[Callable[[StepWork], float]], position: int, *, most: int, limit_s: float) -> int:
    """Return the largest chunk within ``limit_s`` on one device; at least one token, however long it takes."""

    def fits(tokens: int) -> bool:
        work = chunk_work(position, tokens)
        return sum([step_s(work) for step_s in slices]) <= limit_s

    low, high = 1, most
    if fits(high):
        return high
    while high - low > 1 + low // PRECISION:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def chunk_work(position: int, tokens: int) -> StepWork:
    """Return the work of a step with one chunk of a prompt, which begins at ``position``."""
    return StepWork(tokens, 1, position + tokens, tokens * (position + (tokens + 1) / 2), 1)
