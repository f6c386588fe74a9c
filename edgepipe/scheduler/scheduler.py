"""The scheduler: which tokens are computed in which step. See ARCHITECTURE, "Scheduler".

Iteration-level continuous batching from one FIFO pool of ready sequences. A sequence has at most one in-flight step
that samples; earlier chunks of its prompt may precede it in flight. Its driver calls ``next_step`` until there is
none, and again after every ``submit``, ``cancel`` and ``retire``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from edgepipe.errors import PromptTooLong, QueueFull
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler.blocks import BlockAllocator
from edgepipe.scheduler.draft import Draft
from edgepipe.scheduler.policy import Load, Policy
from edgepipe.scheduler.sequence import Phase, Sequence
from edgepipe.scheduler.types import EndReason, Event, ScheduledStep, SequenceEnded, SequenceSpec, TokenSampled


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the pipeline can hold."""

    num_blocks: int
    block_size: int  # tokens
    context_length: int  # tokens of one sequence, prompt and output
    micro_batches: int  # M, the most steps in flight
    max_running: int = 256  # sequences: bounds the rows of a step
    max_waiting: int = 1024  # sequences not admitted yet: some minutes of work for the fastest cluster

    @property
    def max_tokens(self) -> int:
        """The longest that one sequence can become."""
        return min(self.context_length, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts at this moment."""

    micro_batches: int  # M
    in_flight: int  # steps
    running: int  # sequences admitted
    waiting: int  # sequences to be admitted, the preempted ones among them
    num_blocks: int
    free_blocks: int
    preemptions: int  # since the start


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: StepId
    rows: list[tuple[Sequence, bool]]
    num_samples: int


class Scheduler:
    """Owns the sequences, the block tables of the whole pipeline, and the schedule."""

    def __init__(self, limits: SchedulerLimits, policy: Policy) -> None:
        self._limits = limits
        self._policy = policy
        self._blocks = BlockAllocator(limits.num_blocks)
        self._sequences: dict[SequenceId, Sequence] = {}  # those that have not ended
        self._waiting: list[tuple[int, Sequence]] = []  # heap by arrival; ended ones are dropped when they come up
        self._num_waiting = 0
        self._running: dict[SequenceId, Sequence] = {}  # admitted
        self._prefilling: deque[Sequence] = deque()  # admitted with unscheduled tokens, by admission
        self._ready: deque[Sequence] = deque()  # decodes without a step in flight, by when they became ready
        self._num_decodes = 0
        self._unscheduled_prefill = 0  # tokens, of waiting and prefilling sequences
        self._draining_blocks = 0  # of preempted and ended sequences, free once their steps have retired
        self._in_flight: deque[_InFlight] = deque()
        self._frees: list[SequenceId] = []  # to be told with the next step
        self._last_step = 0
        self._arrivals = 0
        self._preemptions = 0

    # What comes in

    def submit(self, specs: Seq[SequenceSpec]) -> list[Event]:
        """Queue sequences that belong together: all or none.

        What an earlier attempt completed ends at once. Raises PromptTooLong, QueueFull.
        """
        for spec in specs:
            self._check_length(len(spec.prompt))
        if self._num_waiting + len(specs) > self._limits.max_waiting:
            raise QueueFull(
                fact=f"{self._num_waiting} sequences wait, at most {self._limits.max_waiting} may",
                next_step="try again in some seconds",
            )
        events: list[Event] = []
        for spec in specs:
            sequence = self._make(spec)
            reason = self._end_reason(sequence) if spec.generated else None
            if reason is None:
                self._sequences[spec.sequence] = sequence
                self._unscheduled_prefill += sequence.unscheduled
                self._wait(sequence)
            else:
                events.append(SequenceEnded(spec.sequence, reason, sequence.num_output))
        return events

    def cancel(self, sequence_id: SequenceId, *, at_position: int = 0) -> list[Event]:
        """Output is wanted up to output position ``at_position`` and no further. Ended sequences are left alone."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return []
        limit = sequence.prompt_tokens + at_position
        if limit < sequence.limit:
            sequence.limit, sequence.limit_reason = limit, EndReason.CANCELLED
        events: list[Event] = []
        if len(sequence.tokens) >= sequence.limit:
            self._end(sequence, EndReason.CANCELLED, events)
        return events

    def set_micro_batches(self, micro_batches: int) -> None:
        """Change M; steps in flight beyond it retire normally."""
        if micro_batches < 1:
            raise ValueError("at least one step is in flight")
        self._limits = replace(self._limits, micro_batches=micro_batches)

    # What goes out

    def next_step(self) -> ScheduledStep | None:
        """The next step to send, or None if M are in flight or nothing is ready."""
        if len(self._in_flight) >= self._limits.micro_batches:
            return None
        budget = self._policy.budget(self._load())
        draft = Draft()
        self._add_decodes(draft, budget.decode_rows)
        self._add_prefills(draft, budget.prefill_tokens)
        if not draft.rows:
            return None
        self._last_step += 1
        step = StepId(self._last_step)
        frees, self._frees = self._frees, []
        scheduled = draft.finish(step, frees)
        self._in_flight.append(_InFlight(step, draft.rows, scheduled.num_samples))
        return scheduled

    def retire(self, step: StepId, ids: Seq[int]) -> list[Event]:
        """The oldest step in flight is done; ``ids`` has one token per sampling row, in row order."""
        record = self._in_flight[0]
        if record.step != step or record.num_samples != len(ids):
            raise ValueError(f"step {record.step} with {record.num_samples} ids is next, not {step} with {len(ids)}")
        self._in_flight.popleft()
        events: list[Event] = []
        tokens = iter(ids)
        for sequence, samples in record.rows:
            sequence.in_flight -= 1
            if samples:
                self._append(sequence, next(tokens), events)
            if not sequence.in_flight and sequence.phase in (Phase.WAITING, Phase.ENDED):
                self._release(sequence)
        return events

    def next_to_retire(self) -> tuple[StepId, int] | None:
        """The oldest step in flight and how many ids its ``retire`` takes."""
        return (self._in_flight[0].step, self._in_flight[0].num_samples) if self._in_flight else None

    def stats(self) -> SchedulerStats:
        """Counts at this moment."""
        return SchedulerStats(
            micro_batches=self._limits.micro_batches,
            in_flight=len(self._in_flight),
            running=len(self._running),
            waiting=self._num_waiting,
            num_blocks=self._blocks.num_blocks,
            free_blocks=self._blocks.free_blocks,
            preemptions=self._preemptions,
        )

    # Filling a step

    def _load(self) -> Load:
        return Load(
            micro_batches=self._limits.micro_batches,
            sampling_rows_in_flight=tuple(record.num_samples for record in self._in_flight),
            running_decodes=self._num_decodes,
            ready_decodes=len(self._ready),
            waiting_prefill_tokens=self._unscheduled_prefill,
            num_blocks=self._blocks.num_blocks,
            free_blocks=self._blocks.free_blocks,
            block_size=self._limits.block_size,
        )

    def _add_decodes(self, draft: Draft, budget: int) -> None:
        deferred: list[Sequence] = []  # their blocks come when steps in flight retire
        while self._ready and budget > 0:
            sequence = self._ready.popleft()
            if self._blocks_for(sequence) <= sequence.num_blocks or self._grow(sequence, promised=len(deferred)):
                draft.add(sequence, 1)
                budget -= 1
            else:
                deferred.append(sequence)
                deferred = [waiting for waiting in deferred if waiting.phase is Phase.DECODE]  # not preempted meanwhile
        self._ready.extendleft(reversed([waiting for waiting in deferred if waiting.phase is Phase.DECODE]))

    def _grow(self, sequence: Sequence, *, promised: int) -> bool:
        """Give a decode its next block. False if it must wait for blocks to drain or was preempted itself.

        ``promised`` of the blocks that are free or drain belong to sequences that wait already.
        """
        while self._blocks.free_blocks + self._draining_blocks <= promised:
            victim = max(self._running.values(), key=lambda candidate: candidate.arrival)
            self._preempt(victim)
            if victim is sequence:
                return False
        if not self._blocks.free_blocks:
            return False
        room = self._room(sequence) - sequence.num_blocks
        sequence.grow(self._blocks.extend(sequence.table, 1, room=room))
        return True

    def _add_prefills(self, draft: Draft, budget: int) -> None:
        while budget > 0:
            if not self._prefilling and not self._admit():
                return
            sequence = self._prefilling[0]
            count = min(sequence.unscheduled, budget)
            draft.add(sequence, count)
            budget -= count
            self._unscheduled_prefill -= count
            if not sequence.unscheduled:
                self._prefilling.popleft()
                sequence.phase = Phase.DECODE
                self._num_decodes += 1

    def _admit(self) -> bool:
        """Admit the first in the queue with blocks for all its known tokens, so that its prefill cannot get stuck.

        One block per running sequence is left to those: admitting somebody only to preempt him is work done twice.
        """
        while self._waiting and self._waiting[0][1].phase is Phase.ENDED:
            heapq.heappop(self._waiting)
        if not self._waiting or len(self._running) >= self._limits.max_running:
            return False
        sequence = self._waiting[0][1]
        count = self._blocks_for(sequence)
        if sequence.in_flight or count + len(self._running) > self._blocks.free_blocks:
            return False  # while in flight (preempted), its last token is not known yet
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        sequence.grow(self._blocks.allocate(count, room=self._room(sequence)))
        sequence.phase = Phase.PREFILL
        self._running[sequence.sequence] = sequence
        self._prefilling.append(sequence)
        return True

    # A sequence's life

    def _make(self, spec: SequenceSpec) -> Sequence:
        limit = self._limits.max_tokens
        if spec.max_tokens is not None:
            limit = min(limit, len(spec.prompt) + spec.max_tokens)
        self._arrivals += 1
        return Sequence(
            sequence=spec.sequence,
            arrival=self._arrivals,
            tokens=[*spec.prompt, *spec.generated],
            prompt_tokens=len(spec.prompt),
            stop_ids=spec.stop_ids,
            limit=limit,
        )

    def _check_length(self, prompt_tokens: int) -> None:
        if prompt_tokens < self._limits.max_tokens:
            return
        short_of_memory = self._limits.max_tokens < self._limits.context_length
        raise PromptTooLong(
            "the prompt is longer than the KV cache of the cluster" if short_of_memory else "",
            fact=f"the prompt has {prompt_tokens} tokens, {self._limits.max_tokens} fit with at least one of output",
            next_step="shorten the prompt" + (" or add a node with memory" if short_of_memory else ""),
        )

    def _append(self, sequence: Sequence, token_id: int, events: list[Event]) -> None:
        if sequence.phase is Phase.ENDED:
            return  # cancelled meanwhile: dropped
        events.append(TokenSampled(sequence.sequence, sequence.num_output, token_id))
        sequence.tokens.append(token_id)
        reason = self._end_reason(sequence)
        if reason is not None:
            self._end(sequence, reason, events)
        elif sequence.phase is Phase.DECODE:
            self._ready.append(sequence)
        else:
            self._unscheduled_prefill += 1  # preempted meanwhile: logged, computed again with the rest

    def _end_reason(self, sequence: Sequence) -> EndReason | None:
        if sequence.num_output and sequence.tokens[-1] in sequence.stop_ids:
            return EndReason.STOP
        return sequence.limit_reason if len(sequence.tokens) >= sequence.limit else None

    def _wait(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        heapq.heappush(self._waiting, (sequence.arrival, sequence))
        self._num_waiting += 1

    def _tidy_queue(self) -> None:
        """Drop ended sequences before those who submit and cancel all day make the queue grow."""
        if len(self._waiting) > 2 * self._num_waiting + 64:
            self._waiting = [entry for entry in self._waiting if entry[1].phase is Phase.WAITING]
            heapq.heapify(self._waiting)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, its blocks to others; all its tokens are computed again later."""
        self._preemptions += 1
        self._leave_running(sequence)
        sequence.scheduled = 0
        self._unscheduled_prefill += len(sequence.tokens)
        self._wait(sequence)
        self._release(sequence)

    def _end(self, sequence: Sequence, reason: EndReason, events: list[Event]) -> None:
        if sequence.phase is Phase.WAITING:
            self._num_waiting -= 1
            self._unscheduled_prefill -= sequence.unscheduled
        else:
            self._leave_running(sequence)
        sequence.phase = Phase.ENDED
        self._tidy_queue()
        del self._sequences[sequence.sequence]
        events.append(SequenceEnded(sequence.sequence, reason, sequence.num_output))
        self._release(sequence)

    def _leave_running(self, sequence: Sequence) -> None:
        del self._running[sequence.sequence]
        if sequence.phase is Phase.PREFILL:
            self._prefilling.remove(sequence)
            self._unscheduled_prefill -= sequence.unscheduled
        else:
            self._num_decodes -= 1
            if sequence in self._ready:
                self._ready.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free the blocks; while steps in flight touch them only count them, until the last of those retires."""
        if sequence.in_flight:
            self._draining_blocks += 0 if sequence.draining else sequence.num_blocks
            sequence.draining = True
            return
        self._draining_blocks -= sequence.num_blocks if sequence.draining else 0
        sequence.draining = False
        if sequence.registered:
            self._frees.append(sequence.sequence)
        self._blocks.release(sequence.forget_blocks())

    # Blocks

    def _blocks_for(self, sequence: Sequence) -> int:
        return -(-len(sequence.tokens) // self._limits.block_size)

    def _room(self, sequence: Sequence) -> int:
        """Blocks that the sequence takes if it uses up its limit."""
        return -(-sequence.limit // self._limits.block_size)
