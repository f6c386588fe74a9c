"""Recurrent layers on every backend: states in slots that stay, move and are shared, of sequences that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import RowState, StateWrite, StepRow
from edgepipe.spec.facts import ModelConfig
from tests.support.backends.maker import NUM_BLOCKS, Maker
from tests.support.backends.steps import make_step, run_step, step_row, token_ids
from tests.support.models.recurrent_layers import MODELS

SLOTS = 7
TOKENS = [np.random.default_rng(seed).integers(1, 31, 24).tolist() for seed in range(3)]


@dataclass(slots=True)
class Kept:
    """A sequence with two blocks of its own, and where its state is."""

    number: int
    length: int = 0
    slot: int | None = None

    def row(self, count: int, slot: int) -> StepRow:
        """The next tokens, whose state goes to a slot."""
        row = step_row(self.length, count, (2 * self.number, 2), sequence=self.number + 1)
        found = replace(row, state=RowState(self.slot, (StateWrite(count, slot),)))
        self.length, self.slot = self.length + count, slot
        return found


def compute(backend: Backend, rows: Sequence[StepRow]) -> np.ndarray:
    """Logits of every token; the sequence's number names its tokens."""
    parts = [TOKENS[int(row.sequence) - 1][row.position : row.position + row.num_tokens] for row in rows]
    return run_step(backend, make_step(rows), token_ids(*parts))


def loaded(maker: Maker, config: ModelConfig) -> Backend:
    backend = maker.loaded(config)
    backend.allocate_kv(num_blocks=NUM_BLOCKS, block_size=maker.block_size, state_slots=SLOTS)
    return backend


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> ModelConfig:
    return MODELS[request.param]


def test_decoding_beside_others_is_the_prompt(maker: Maker, model: ModelConfig) -> None:
    """Single tokens run in graphs where a device has them: with surplus rows, and other slots in each step."""
    backend = loaded(maker, model)
    expected = [compute(backend, [Kept(number).row(24, number)]) for number in range(3)]
    kept = [Kept(number) for number in range(3)]
    compute(backend, [each.row(4 + each.number, each.number) for each in kept])
    for turn, together in enumerate([(0, 1, 2)] * 4 + [(2, 0), (1,), (2, 0), (1,), (0, 2), (1, 2, 0), (0, 1, 2)]):
        rows = [kept[number].row(1, number if turn % 3 else number + 3) for number in together]
        for number, found in zip(together, compute(backend, rows), strict=True):
            maker.assert_same(found, expected[number][kept[number].length - 1])


def test_a_snapshot_is_read_by_several_and_stays(maker: Maker, model: ModelConfig) -> None:
    backend = loaded(maker, model)
    expected = compute(backend, [Kept(0).row(24, 0)])
    first = Kept(0)
    row = first.row(10, 1)
    compute(backend, [replace(row, state=RowState(None, (StateWrite(6, 5), StateWrite(10, 1))))])
    for slot in (2, 3, 5):  # the last one overwrites the snapshot
        again = Kept(0, length=6, slot=5)
        for at in range(6, 10):
            maker.assert_same(compute(backend, [again.row(1, slot)])[0], expected[at])


def test_a_state_of_zeros_or_of_another_is_wrong(maker: Maker, model: ModelConfig) -> None:
    backend = loaded(maker, model)
    expected = compute(backend, [Kept(0).row(24, 0)])
    compute(backend, [Kept(0).row(8, 1), Kept(1).row(8, 2)])
    for slot, right in ((1, True), (2, False), (6, False)):
        found = compute(backend, [Kept(0, length=8, slot=slot).row(1, 4)])[0]
        (maker.assert_same if right else maker.assert_different)(found, expected[8])
