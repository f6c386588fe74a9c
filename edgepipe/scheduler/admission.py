"""Admit waiting sequences as far as blocks go, and preempt running ones where others need theirs. PURE."""

from __future__ import annotations

from edgepipe.scheduler.kv import Key
from edgepipe.scheduler.phases import Phases
from edgepipe.scheduler.sequence import Sequence
from edgepipe.scheduler.sequence_pool import MAX_PREEMPTED, SequencePool
from edgepipe.scheduler.tables import BlockTables


class SequenceAdmission:
    """Decides which sequences hold blocks."""

    def __init__(self, pool: SequencePool, tables: BlockTables, *, windows: bool) -> None:
        """``windows``: whether some layers keep a window, so that prompts get blocks bit by bit."""
        self._pool = pool
        self._tables = tables
        self._windows = windows

    def admit_waiting(self, phases: Phases | None, *, carried: bool) -> None:
        """Admit sequences from the head of the queue that can be computed side by side, until one does not fit.

        No sequence passes one that does not fit. A sequence whose first tokens another is computing waits for them, and
        others pass it meanwhile.

        phases   of a batch, whose newest phase is one of prompts; it may admit fewer
        carried  see ``BlockTables.admit``
        """
        pool, tables = self._pool, self._tables
        if settled := tables.take_settled():
            pool.waiting.wake(settled)
            pool.head_does_not_fit = False
        if pool.head_does_not_fit and not tables.may_fit_now:
            return
        while (first := self._next_to_admit(phases)) is not None:
            if first.in_flight:
                return  # preempted: its last token is not known yet
            if (key := tables.awaited(first)) is not None:
                self._wait_for(first, key)
            elif (ticket := tables.fetch(first, running=len(pool.running))) is not None:
                pool.waiting.park(ticket)
            elif not self._admit(first, phases, carried=carried) and not (
                tables.lacked_room and self._preempt_for(first)
            ):
                pool.head_does_not_fit = not tables.awaits_moves
                return

    def make_room(self, phases: Phases | None) -> None:
        """Preempt a sequence for the first in the queue, if that one stays behind it. A step for it comes later."""
        if (first := self._next_to_admit(phases)) is not None:
            self._preempt_for(first)

    def fill_windows(self) -> None:
        """Allocate blocks for prompts that have none for their next token."""
        for prompt in self._pool.prompts if self._windows else ():
            if not prompt.next_tokens:
                self._tables.fill_windows(prompt)

    def grow(self, sequence: Sequence, *, promised: int) -> bool:
        """Give a decode its next block. Return False if it must wait for draining blocks or was preempted itself.

        ``promised``: free or draining blocks that already belong to waiting decodes.
        """
        while self._tables.blocks_to_come <= promised:
            victim = self._youngest()
            self._pool.preempt(victim)
            if victim is sequence:
                return False
        return self._tables.grow(sequence)

    def make_way(self) -> bool:
        """Preempt the youngest sequence if prompts hold one another's blocks. Call it while no step is in flight."""
        pool = self._pool
        if len(pool.running) < 2 or not pool.prompts:
            return False
        if any(prompt.next_tokens > 0 for prompt in pool.prompts):
            return False
        pool.preempt(self._youngest())
        return True

    def _next_to_admit(self, phases: Phases | None) -> Sequence | None:
        """Return the first in the queue, if it would be computed soon once its blocks are allocated."""
        first = self._pool.waiting.first()
        if first is None or not self._pool.prompts.accepts(first):
            return None
        return first if phases is None or phases.admits(first) else None

    def _wait_for(self, sequence: Sequence, key: Key) -> None:
        """Park a sequence until the block is computed. The computing sequence inherits a higher priority."""
        self._pool.waiting.park(key)
        owner = self._tables.await_key(key)
        if owner is not None:
            computing = self._pool.running[owner]
            computing.priority = min(computing.priority, sequence.priority)

    def _admit(self, sequence: Sequence, phases: Phases | None, *, carried: bool) -> bool:
        """Admit the first sequence in the queue with blocks for all its known tokens, so that its prefill cannot stall.

        Free blocks remain for running sequences: admitting a sequence only to preempt it does work twice. More remain
        beside other prompts, because its turn comes later.
        """
        pool = self._pool
        running, beside_prompts = len(pool.running), bool(pool.prompts)
        if not self._tables.admit(sequence, running=running, beside_prompts=beside_prompts, carried=carried):
            return False
        pool.note_admitted(sequence)
        if phases is not None:
            phases.note_admitted(sequence)
        return True

    def _preempt_for(self, first: Sequence) -> bool:
        """Preempt the youngest sequence that stays behind ``first``, if such sequences hold what ``first`` lacks.

        Return whether one was preempted. The next one is preempted once the steps in flight have freed its blocks.
        """
        running = self._pool.running
        lower = [each for each in running.values() if _stays_behind(each, first)]
        if not lower or self._tables.draining_blocks:
            return False
        if not self._tables.would_fit(first, without=lower, running=len(running) - len(lower)):
            return False
        self._pool.preempt(max(lower, key=lambda candidate: candidate.arrival))
        return True

    def _youngest(self) -> Sequence:
        return max(self._pool.running.values(), key=lambda candidate: (candidate.priority, candidate.arrival))


def _stays_behind(sequence: Sequence, first: Sequence) -> bool:
    """Whether a running sequence, if it were preempted, would wait behind ``first``."""
    rises = sequence.preemptions + 1 >= MAX_PREEMPTED and sequence.arrival < first.arrival
    return sequence.priority > first.priority and not rises
