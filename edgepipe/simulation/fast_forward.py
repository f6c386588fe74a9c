"""The scheduler of a simulation: it skips steps that need no decision. PURE.

A simulation needs only the steps' times. ``steady_steps`` says how many of the next steps only repeat those in flight;
``repeat`` does their work at once, with the same results.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from edgepipe.ids import StepId
from edgepipe.scheduler import Policy, Scheduler, SchedulerLimits
from edgepipe.scheduler.kv import Key
from edgepipe.scheduler.phases import TokenKinds
from edgepipe.scheduler.sequence import NEVER, Phase, Sequence
from edgepipe.scheduler.tables import BlockTables


class FastForwardScheduler(Scheduler):
    """A scheduler whose steps in flight can be repeated without scheduling each."""

    def __init__(self, limits: SchedulerLimits, policy: Policy) -> None:
        self._forecast = _ForecastTables(limits)
        super().__init__(limits, policy, tables=self._forecast)

    def steady_steps(self) -> int:
        """Return how many of the next steps need no decision: the steps in flight, in turn, each row one token further.

        During them no sequence ends by length and the free blocks suffice. 0 if the next step needs a decision.
        """
        records = self._steps.records
        if self._windows.drafting is not None:
            return 0
        admits = self._waiting.any_parked or (len(self._waiting) and self._may_admit_after_decodes)
        # A phase of decodes ends when their number changes.
        admits = admits and self._mode.kinds is not TokenKinds.DECODES
        if self._ready or self._prompts or admits or self._forecast.has_frees or self._tables.states is not None:
            return 0
        if not 0 < len(records) <= self.micro_batches or not self._sizes_stay():
            return 0
        turns = NEVER
        for record in records:
            if record.chunks:
                return 0
            for sequence in record.decodes:
                if sequence.phase is not Phase.DECODE or sequence.stop_ids:
                    return 0
                turns = min(turns, sequence.limit - len(sequence.tokens) - 1)
        return max(0, self._forecast.turns_with_blocks(self._running.values(), turns)) * len(records)

    def repeat(self, steps: int, token_id: int) -> list[int]:
        """Do the work of ``steps`` pairs of ``retire`` (with ``token_id`` for each row) and ``next_step``.

        ``steps`` is at most ``steady_steps``. Returns the blocks in use after each. The next real step carries the
        table changes of all of them.
        """
        records = self._steps.records
        turns, more = divmod(steps, len(records))
        grown = [0] * steps
        for index, record in enumerate(records):
            times = turns + (index < more)
            for sequence in record.decodes:
                known = len(sequence.tokens)
                for time in range(sequence.room - known, times, self._limits.block_size):
                    grown[time * len(records) + index] += 1
                self._resume(sequence, [token_id] * times)
        used = accumulate(grown, initial=self.used_blocks - sum(grown))
        records.rotate(-more)
        self._last_step += steps
        for step, record in enumerate(records, start=self._last_step - len(records) + 1):
            record.step = StepId(step)
        return list(used)[1:]

    @property
    def _may_admit_after_decodes(self) -> bool:
        """Whether a waiting sequence may be admitted while all running sequences decode and none ends."""
        return not self._pool.head_does_not_fit or self._forecast.may_fit_after_decodes(self._running.values())

    def _sizes_stay(self) -> bool:
        """Return whether the policy lets each step in flight repeat at its size."""
        sizes = [record.num_sampling for record in self._steps.records]
        load = self._bounds.load()
        for index, size in enumerate(sizes):
            others = (*sizes[index + 1 :], *sizes[:index])
            come_back = load._replace(sampling_rows_in_flight=others, ready_decodes=size)
            if self._mode.policy.budget(come_back).decode_rows < size:
                return False
        return True

    def _resume(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Append a decode's next tokens. All but the last are computed."""
        sequence.tokens += token_ids
        sequence.scheduled = len(sequence.tokens)
        while sequence.room < sequence.scheduled:
            self._tables.grow(sequence)
        self._tables.note_computed(sequence, sequence.scheduled - 1)


class _ForecastTables(BlockTables):
    """Block tables that say what may happen while all sequences decode."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        # Keys of the prompt that the last ``admit`` refused, if cache hits would lower its need.
        self._refused_keys: list[Key] = []

    @property
    def has_frees(self) -> bool:
        """Whether the next step must list sequences to forget."""
        return bool(self._frees)

    def may_fit_after_decodes(self, sequences: Iterable[Sequence]) -> bool:
        """Whether the sequence that the last ``admit`` refused may fit while these sequences, all there are, decode."""
        if self.may_fit_now or self._short_of is not None or any(pool.any_stale for pool in self._pools()):
            return True
        keys = self._refused_keys
        known = [(each.known_blocks, each.keys) for each in sequences]
        return any(count < len(keys) and (not count or own[count - 1] == keys[count - 1]) for count, own in known)

    def turns_with_blocks(self, sequences: Iterable[Sequence], most: int) -> int:
        """Lower bound on the tokens per sequence that still fit in free blocks, at most ``most``."""
        size = self._limits.block_size
        rooms = [sequence.room - len(sequence.tokens) for sequence in sequences]
        free = min([self._kv.free_blocks, *[each.kv.free_blocks for each in self._windows]])
        turns = min(most, free * size)
        while turns > 0 and sum([-(-(turns - room) // size) for room in rooms if room < turns]) > free:
            turns //= 2
        return turns

    def _refuse(self, keys: list[Key], *, short_of: int | None = None, lacks_room: bool = True) -> bool:
        self._refused_keys = keys
        return super()._refuse(keys, short_of=short_of, lacks_room=lacks_room)
