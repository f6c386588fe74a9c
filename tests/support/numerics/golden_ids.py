"""The reference's outputs for the demo model (float32 from bf16 weights), and what a pipeline owes them.

``gaps`` is the reference's distance between its two best logits at each step. Rounding activations to bf16 between up
to four stages moved a gap by at most 0.085, so a step with a gap of 0.1 or more is decided; with bf16 compute, 1.0.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

FILE = Path(__file__).parents[2] / "data" / "golden_smollm2.json"
FLOAT32_GAP = 0.1
BF16_GAP = 1.0
BF16_SHARE = 0.95  # share of all steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt with 64 greedy tokens."""

    name: str
    prompt_ids: tuple[int, ...]
    greedy_ids: tuple[int, ...]
    gaps: tuple[float, ...]

    @property
    def num_decided(self) -> int:
        """Steps before the first whose gap is below 0.1."""
        return next((i for i, gap in enumerate(self.gaps) if gap < FLOAT32_GAP), len(self.gaps))

    @property
    def longest_decided(self) -> range:
        """The longest run of steps without a gap below 0.1; generation from its start gives the reference's ids."""
        ties = [-1, *(i for i, gap in enumerate(self.gaps) if gap < FLOAT32_GAP), len(self.gaps)]
        return max((range(a + 1, b) for a, b in itertools.pairwise(ties)), key=len)


def items() -> list[Item]:
    """All items of the file."""
    found = json.loads(FILE.read_text(encoding="utf-8"))["items"]
    return [
        Item(
            name=item["name"],
            prompt_ids=tuple(item["prompt_ids"]),
            greedy_ids=tuple(item["greedy_ids"]),
            gaps=tuple(item["gaps"]),
        )
        for item in found
    ]


def assert_greedy(found: Sequence[int], item: Item) -> None:
    """Free-running ids equal the reference's up to the first undecided step."""
    count = min(len(found), item.num_decided)
    assert list(found[:count]) == list(item.greedy_ids[:count]), item.name


def assert_forced(logits: npt.NDArray[np.float32], item: Item, *, bf16: bool = False) -> None:
    """Top-1 on the reference's tokens equals it at every decided step; bf16 also at 95 % of all.

    logits [n, V], n <= 64 first steps.
    """
    assert bool(np.isfinite(logits).all()), item.name
    count = len(logits)
    right = logits.argmax(-1) == np.array(item.greedy_ids[:count])
    decided = np.array(item.gaps[:count]) >= (BF16_GAP if bf16 else FLOAT32_GAP)
    wrong = np.flatnonzero(decided & ~right)
    assert wrong.size == 0, f"{item.name}: steps {wrong.tolist()}, gaps {[item.gaps[i] for i in wrong]}"
    if bf16:
        assert right.mean() >= BF16_SHARE, f"{item.name}: {right.sum()} of {count}"
