"""Drafts that are made beside the steps: lots behind lots, and a new beginning behind a wrong one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from edgepipe.backend.drafting import Drafts, DraftSource
from edgepipe.ids import EngineId, Epoch, SequenceId, StepId
from edgepipe.sampling import SamplingParams, SequenceSampler
from edgepipe.stage.drafting import DraftWish, Lot, SequenceDrafter
from edgepipe.stage.drafts_ahead import DraftsAhead
from edgepipe.wire.reports import Drafted

EPOCH = Epoch(1, EngineId("engine"))
MODEL = DraftSource.MODEL
PATIENCE_S = 30.0
OTHER = SequenceId(99)


class Counting:
    """It thinks that each token is followed by the next number."""

    def __init__(self) -> None:
        self.tokens: list[int] = [10]

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        return self.go_on(tokens, (), count)

    def go_on(self, tokens: Sequence[int], assumed: Sequence[int], count: int) -> Drafts:
        self.tokens += tokens
        last = [*self.tokens, *assumed][-1]
        return Drafts(tuple(range(last + 1, last + 1 + count)), (MODEL,) * count)


class OnlyProposes:
    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        return Drafts((1,) * count, (MODEL,) * count)


def drafter_of(own: Counting | OnlyProposes) -> SequenceDrafter:
    return SequenceDrafter(lambda: own, SequenceSampler(SamplingParams()), known=1)


def found(lot: Lot | None) -> tuple[int, int, tuple[int, ...]] | None:
    return None if lot is None else (lot.step, lot.position, lot.drafts.ids)


def test_lots_follow_one_another_until_there_are_enough() -> None:
    drafter = drafter_of(Counting())
    drafter.took(StepId(4), [11])
    assert found(drafter.go_on(lot=2, most=5)) == (4, 2, (12, 13))
    assert found(drafter.go_on(lot=2, most=5)) == (4, 4, (14, 15))
    assert drafter.go_on(lot=2, most=5) is None
    drafter.took(StepId(5), [12])
    assert found(drafter.go_on(lot=2, most=5)) == (5, 6, (16, 17)), "a right draft makes room"
    drafter.took(StepId(6), [13, 70])
    assert found(drafter.go_on(lot=2, most=5)) == (6, 5, (71, 72)), "a wrong one begins anew"


def test_single_windows_between_flights_begin_anew() -> None:
    own = Counting()
    drafter = drafter_of(own)
    drafter.took(StepId(4), [11])
    drafter.go_on(lot=2, most=5)
    assert drafter.propose([12], 3).ids == (13, 14, 15)
    assert drafter.propose([13, 14], 0).ids == ()
    drafter.took(StepId(9), [15])
    assert found(drafter.go_on(lot=1, most=5)) == (9, 6, (16,))
    assert own.tokens == [10, 11, 12, 13, 14, 15]


def test_a_drafter_that_cannot_go_on_makes_none() -> None:
    drafter = drafter_of(OnlyProposes())
    drafter.took(StepId(4), [11])
    assert drafter.go_on(lot=2, most=5) is None
    assert drafter.propose([12], 2).ids == (1, 1)


def reported(act: Callable[[DraftsAhead], None], *, count: int) -> list[Drafted]:
    """All that is reported, which is at least so much. Lots of another sequence show that no more would come."""
    lots: list[Drafted] = []
    came = threading.Semaphore(0)

    def take(lot: Drafted) -> None:
        lots.append(lot)
        came.release()

    ahead = DraftsAhead(EPOCH, take)
    act(ahead)
    for _ in range(count):
        assert came.acquire(timeout=PATIENCE_S)
    for _ in range(2):  # the thread queues a sequence's next lot after it has reported one
        ahead.took(DraftWish(drafter_of(Counting()), 1, OTHER, 1), StepId(4), [11])
        assert came.acquire(timeout=PATIENCE_S)
    ahead.close()
    return [lot for lot in lots if lot.sequence != OTHER]


def test_lots_are_reported_until_there_are_enough() -> None:
    wish = DraftWish(drafter_of(Counting()), 5, SequenceId(7), 2)
    lots = reported(lambda ahead: ahead.took(wish, StepId(4), [11]), count=2)
    assert [(lot.sequence, lot.step, lot.position, lot.ids) for lot in lots] == [
        (7, 4, 2, (12, 13)),
        (7, 4, 4, (14, 15)),
    ]
    assert lots[0].sources == (MODEL, MODEL)


def test_a_drafter_that_fails_ends_the_lots_of_its_sequence_only() -> None:
    class Failing(Counting):
        def go_on(self, tokens: Sequence[int], assumed: Sequence[int], count: int) -> Drafts:
            raise RuntimeError("no")

    def act(ahead: DraftsAhead) -> None:
        ahead.took(DraftWish(drafter_of(Failing()), 5, SequenceId(1), 2), StepId(4), [11])
        ahead.took(DraftWish(drafter_of(Counting()), 2, SequenceId(2), 2), StepId(4), [11])

    assert [lot.sequence for lot in reported(act, count=1)] == [2]


def test_nothing_is_reported_after_the_end() -> None:
    lots: list[Drafted] = []
    ahead = DraftsAhead(EPOCH, lots.append)
    ahead.close()
    ahead.took(DraftWish(drafter_of(Counting()), 5, SequenceId(1), 2), StepId(4), [11])
    assert not lots
