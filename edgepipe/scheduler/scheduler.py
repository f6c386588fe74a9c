"""The scheduler: decides which step computes which tokens. See docs/architecture/scheduler.md.

Iteration-level continuous batching from one FIFO pool of ready sequences. A sequence has at most one in-flight step
that samples; earlier chunks of its prompt may precede it in flight. Prompts are computed side by side. A suspected
sequence (``SequenceSpec.alone``) gets isolated steps until one of them has sampled a token. The driver calls
``next_step`` until it returns None, and again after every ``submit``, ``cancel`` and ``retire``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from edgepipe.backend.types import BlockCopy
from edgepipe.errors import PromptTooLong, QueueFull
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler.draft import Draft
from edgepipe.scheduler.kv import Key
from edgepipe.scheduler.limits import SchedulerLimits, SchedulerStats
from edgepipe.scheduler.pacing import Chunk, Pacer, Waiting
from edgepipe.scheduler.policy import Load, Policy, StepBudget
from edgepipe.scheduler.prompts import Prompts
from edgepipe.scheduler.queue import WaitingQueue
from edgepipe.scheduler.sequence import Phase, Sequence
from edgepipe.scheduler.tables import BlockTables, KeptPools
from edgepipe.scheduler.types import (
    EndReason,
    Event,
    Priority,
    ScheduledStep,
    SequenceEnded,
    SequenceSpec,
    TokenSampled,
)

_MAX_PREEMPTED = 2  # after so many preemptions a batch sequence counts as interactive


@dataclass(slots=True)
class _InFlight:
    step: StepId
    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int, bool]]  # sequence, its tokens computed after the step, whether the row samples
    copies: list[BlockCopy]
    num_tokens: int
    num_samples: int
    isolated: bool


class Scheduler:
    """Owns the sequences, the block tables of the whole pipeline, and the schedule."""

    def __init__(self, limits: SchedulerLimits, policy: Policy) -> None:
        self._limits = limits
        self._policy = policy
        self._tables = BlockTables(limits)
        self._sequences: dict[SequenceId, Sequence] = {}  # sequences that have not ended
        self._waiting = WaitingQueue()
        self._running: dict[SequenceId, Sequence] = {}  # admitted
        self._prompts = Prompts()  # admitted with unscheduled tokens
        self._ready: deque[Sequence] = deque()  # decodes without a step in flight, in the order of becoming ready
        self._num_decodes = 0  # suspected sequences are not counted
        self._head_does_not_fit = False  # the first in the queue was not admitted, and nothing changed since
        self._unscheduled_prefill = 0  # tokens, of waiting and prefilling sequences
        self._in_flight: deque[_InFlight] = deque()
        self._pacer: Pacer | None = None
        self._chunk: Chunk | None = None  # newest choice of the pacer
        self._prompt_slot = False  # whether fewer than P steps in flight hold prompt tokens
        self._may_add_chunk = True  # whether a step of prompts alone may join those in flight while sequences decode
        self._last_step = 0
        self._arrivals = 0
        self._preemptions = 0
        self._computed_tokens = 0
        self._replayed_last = False  # whether the newest shared step holds replayed tokens
        self._isolated_last = False  # whether the newest step is isolated

    # From epoch to epoch

    def hand_over(self) -> KeptPools:
        """Return the KV cache that retired steps left, for the next epoch's scheduler. Call this last."""
        return self._tables.carry_over()

    def take_over(self, pools: KeptPools) -> None:
        """Start with the previous epoch's KV cache, before any ``submit``.

        The caller has marked lost blocks with ``KeptPools.lose``. Raises ValueError if a number of blocks differs.
        """
        self._tables.take_over(pools)

    # Input

    def submit(self, specs: Seq[SequenceSpec], *, accepted: bool = False) -> list[Event]:
        """Queue sequences of one request: all or none.

        A sequence that an earlier attempt completed ends at once. Raises PromptTooLong, and QueueFull unless
        ``accepted``: a previous epoch accepted them.
        """
        for spec in specs:
            self._check_length(len(spec.prompt))
        if not accepted and len(self._waiting) + len(specs) > self._limits.max_waiting:
            raise QueueFull(
                fact=f"{len(self._waiting)} sequences wait, at most {self._limits.max_waiting} may",
                next_step="try again in some seconds",
            )
        events: list[Event] = []
        for spec in specs:
            sequence = self._make(spec)
            sequence.carried = accepted
            reason = self._end_reason(sequence) if spec.generated else None
            if reason is None:
                self._sequences[spec.sequence] = sequence
                self._unscheduled_prefill += sequence.unscheduled
                self._wait(sequence)
            else:
                events.append(SequenceEnded(spec.sequence, reason, sequence.num_output))
        return events

    def cancel(self, sequence_id: SequenceId, *, at_position: int = 0) -> list[Event]:
        """End a sequence at output position ``at_position``, at once if it is reached. Ignores ended sequences."""
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

    def set_pacer(self, pacer: Pacer) -> None:
        """Set what chooses the size and number of prompt chunks. Without it, M steps with prompt tokens may go."""
        self._pacer = pacer

    # Output

    def next_step(self) -> ScheduledStep | None:
        """Return the next step to send, or None if nothing is ready or fits.

        At most M steps in flight hold decodes, and at most P hold prompt tokens. A step may hold both. Suspected
        sequences take turns with all others, so both kinds together then have the larger of M and P.
        """
        if self._prompts.any_suspected and len(self._in_flight) >= max(self._limits.micro_batches, self.prompt_steps):
            return None
        preemptions = self._preemptions
        draft = self._fill()
        # Again if the budget was for sequences that were preempted, or if no prompt has blocks for its next tokens.
        while draft.empty and (self._preemptions > preemptions or self._make_way()):
            preemptions = self._preemptions
            draft = self._fill()
        if draft.empty:
            return None
        self._last_step += 1
        if not draft.decodes:
            self._may_add_chunk = False
        self._isolated_last = draft.isolated
        if not draft.isolated:
            self._replayed_last = draft.replays
        self._tables.note_sent(draft.copies)
        scheduled = draft.finish(StepId(self._last_step), self._tables.pop_frees())
        self._in_flight.append(
            _InFlight(
                scheduled.step,
                draft.decodes,
                draft.chunks,
                draft.copies,
                len(scheduled.token_ids),
                len(draft.decodes) + sum([samples for _, _, samples in draft.chunks]),
                draft.isolated,
            )
        )
        return scheduled

    def retire(self, step: StepId, ids: Seq[int]) -> list[Event]:
        """Complete the oldest step in flight. ``ids``: one token per sampling row, in row order."""
        record = self._in_flight[0]
        if record.step != step or record.num_samples != len(ids):
            raise ValueError(f"step {record.step} with {record.num_samples} ids is next, not {step} with {len(ids)}")
        self._in_flight.popleft()
        self._may_add_chunk = True
        self._computed_tokens += record.num_tokens
        if record.copies:
            self._tables.note_copied(record.copies)
            self._head_does_not_fit = False
        events: list[Event] = []
        for sequence, token_id in zip(record.decodes, ids, strict=False):  # ids of the chunks come after
            self._computed(sequence, len(sequence.tokens))
            self._append(sequence, token_id, events)
            if sequence.phase is not Phase.DECODE:
                self._release_if_idle(sequence)
        tokens = iter(ids[len(record.decodes) :])
        for sequence, end, samples in record.chunks:
            self._computed(sequence, end)
            if samples:
                self._clear(sequence)
                self._append(sequence, next(tokens), events)
            self._release_if_idle(sequence)
        return events

    def tokens(self, sequence_id: SequenceId) -> Seq[int]:
        """Return the known tokens, prompt and output, of a sequence that has not ended."""
        return self._sequences[sequence_id].tokens

    @property
    def num_running(self) -> int:
        """Number of admitted sequences."""
        return len(self._running)

    @property
    def used_blocks(self) -> int:
        """Number of blocks that sequences hold."""
        return self._tables.num_blocks - self._tables.free_blocks

    @property
    def chunk(self) -> Chunk | None:
        """How the newest step with prompt tokens was planned; None before, and while a stage's times are not known."""
        return self._chunk

    @property
    def micro_batches(self) -> int:
        """M."""
        return self._limits.micro_batches

    def stats(self) -> SchedulerStats:
        """Return the current counts."""
        states = self._tables.states
        return SchedulerStats(
            micro_batches=self._limits.micro_batches,
            in_flight=len(self._in_flight),
            running=len(self._running),
            waiting=len(self._waiting),
            num_blocks=self._tables.num_blocks,
            free_blocks=self._tables.free_blocks,
            state_slots=states.num_slots if states is not None else 0,
            free_slots=states.free_slots if states is not None else 0,
            missed_snapshots=states.missed if states is not None else 0,
            cached_blocks=self._tables.cached_blocks,
            preemptions=self._preemptions,
            admitted_tokens=self._tables.admitted_tokens,
            cached_tokens=self._tables.cached_tokens,
            computed_tokens=self._computed_tokens,
            kept_tokens=self._tables.kept_tokens,
            replayed_tokens=self._tables.replayed_tokens,
        )

    # Filling a step

    def _fill(self) -> Draft:
        """Alternate isolated and shared steps while there is work for both."""
        self._prompt_slot = self._choose_chunk()
        if self._prompts.any_suspected and not self._isolated_last:
            draft = self._fill_isolated()
            if not draft.empty:
                return draft
        draft = self._fill_shared()
        return self._fill_isolated() if draft.empty and self._prompts.any_suspected else draft

    def _choose_chunk(self) -> bool:
        """Choose P and the size of the next step with prompt tokens. Return whether fewer than P are in flight."""
        if not self._prompts_go:
            return self._unscheduled_prefill > 0
        in_flight = sum([1 for step in self._in_flight if step.chunks])
        # Decodes that come back may ride in one step more, for one without decodes that will not be followed.
        more = bool(self._ready) and any(step.chunks and not step.decodes for step in self._in_flight)
        if in_flight < self.prompt_steps + more and self._pacer is not None:
            self._chunk = self._pacer.chunk(self._waiting_prompts())
        return in_flight < self.prompt_steps + more

    @property
    def _prompts_go(self) -> bool:
        """Whether prompts are computed, or the first in the queue may be admitted."""
        return bool(self._prompts) or (len(self._waiting) > 0 and not self._head_does_not_fit)

    def _may_decode(self) -> bool:
        """Whether fewer steps in flight hold decodes than may."""
        return sum([1 for step in self._in_flight if step.decodes]) < self._decode_steps

    @property
    def _decode_steps(self) -> int:
        """M, or P if that is less while prompts wait: decodes that ride with chunks save a read of the weights."""
        if self._prompts_go and self.prompt_steps > 1:
            return min(self._limits.micro_batches, self.prompt_steps)
        return self._limits.micro_batches

    def _may_prefill(self, draft: Draft) -> bool:
        """Whether the step may hold prompt tokens.

        Beside protected decodes, one step without decodes may follow each step that retires: more at once would delay
        the decodes that come back next by more than one chunk.
        """
        spaced = self._chunk is not None and self._chunk.spaced
        return self._prompt_slot and (bool(draft.decodes) or self._may_add_chunk or not spaced)

    @property
    def prompt_steps(self) -> int:
        """P: the maximum number of steps in flight with prompt tokens."""
        return self._limits.micro_batches if self._chunk is None else self._chunk.in_flight

    def _waiting_prompts(self) -> Waiting:
        first = self._prompts.oldest or self._waiting.first()
        left = first.unscheduled if first is not None else 0
        held = (self._tables.num_blocks - self._tables.free_blocks) * self._limits.block_size
        return Waiting(
            prompt=first.sequence if first is not None else 0,
            position=self._prompts.furthest_position,
            left=left,
            others=max(0, self._unscheduled_prefill - left),
            decodes=self._num_decodes,
            context=held // max(1, len(self._running)),
            micro_batches=self._limits.micro_batches,
            protected=self._num_decodes > 0 and any(self._is_protected(each) for each in self._running.values()),
        )

    @staticmethod
    def _is_protected(sequence: Sequence) -> bool:
        return sequence.phase is Phase.DECODE and sequence.priority is Priority.INTERACTIVE

    def _fill_isolated(self) -> Draft:
        """Fill a step with one suspected sequence that has blocks. Each of k such gets one of the next 2k steps."""
        self._fill_windows()
        sequence = self._prompts.next_suspected()
        if sequence is None:
            return self._new_draft(isolated=True)
        draft = self._new_draft(self._tables.stale_to if sequence.replays else None, isolated=True)
        num_tokens = min(sequence.next_tokens, self._isolated_tokens(), self._most_chunk_tokens)
        self._add_chunk(draft, sequence, num_tokens)
        return draft

    def _isolated_tokens(self) -> int:
        """Return the usual prefill budget; if that is 0, the budget without decodes."""
        load = self._load()
        if tokens := self._policy.budget(load).prefill_tokens:
            return tokens
        nothing_else = load._replace(sampling_rows_in_flight=(), running_decodes=0, ready_decodes=0)
        return self._policy.budget(nothing_else).prefill_tokens

    def _fill_shared(self) -> Draft:
        budget = self._policy.budget(self._load())
        if (last_slice := self._tables.stale_to) is not None:
            return self._fill_replay_or_whole(budget, last_slice)
        return self._fill_whole(budget)

    def _fill_whole(self, budget: StepBudget) -> Draft:
        draft = self._new_draft()
        if self._may_decode():
            self._add_decodes(draft, budget.decode_rows)
        self._add_prefills(draft, budget.prefill_tokens)
        return draft

    def _fill_replay_or_whole(self, budget: StepBudget, last_slice: int) -> Draft:
        """Alternate steps of replayed tokens and steps through all slices while there is work for both."""
        draft = self._fill_whole(budget) if self._replayed_last else self._new_draft()
        if draft.empty:
            draft = self._new_draft(last_slice)
            self._add_prefills(draft, budget.prefill_tokens)
        return self._fill_whole(budget) if draft.empty else draft

    def _new_draft(self, last_slice: int | None = None, *, isolated: bool = False) -> Draft:
        return Draft(last_slice=last_slice, isolated=isolated, states=self._tables.states)

    def _load(self) -> Load:
        return Load(
            micro_batches=self._decode_steps,
            sampling_rows_in_flight=tuple([0 if step.isolated else step.num_samples for step in self._in_flight]),
            running_decodes=self._num_decodes,
            ready_decodes=len(self._ready),
            waiting_prefill_tokens=self._unscheduled_prefill,
            num_blocks=self._tables.num_blocks,
            free_blocks=self._tables.free_blocks,
            block_size=self._limits.block_size,
            reserved_tokens=self._prompts.unscheduled_tokens,
            step_tokens=None if self._chunk is None else self._chunk.step_tokens,
            most_prefill_tokens=self._most_prefill_tokens(),
        )

    def _most_prefill_tokens(self) -> int | None:
        """Return the bound on a step's prompt tokens, for the prompt that is furthest on; None if not known."""
        if self._pacer is None or self._policy.paced or not self._prompt_slot:
            return None
        return self._pacer.most_tokens(self._prompts.furthest_position, waiting=self._unscheduled_prefill)

    def _add_decodes(self, draft: Draft, budget: int) -> None:
        deferred: list[Sequence] = []  # they wait for blocks of steps in flight
        ready = self._ready
        while ready and budget > 0:
            sequence = ready.popleft()
            if len(sequence.tokens) <= sequence.room or self._grow(sequence, promised=len(deferred)):
                draft.add_decode(sequence)
                budget -= 1
            else:
                deferred.append(sequence)
                # A deferred sequence may be preempted meanwhile.
                deferred = [waiting for waiting in deferred if waiting.phase is Phase.DECODE]
        self._ready.extendleft(reversed([waiting for waiting in deferred if waiting.phase is Phase.DECODE]))

    def _grow(self, sequence: Sequence, *, promised: int) -> bool:
        """Give a decode its next block. Return False if it must wait for draining blocks or was preempted itself.

        ``promised``: free or draining blocks that already belong to waiting decodes.
        """
        while self._tables.blocks_to_come <= promised:
            victim = self._youngest()
            self._preempt(victim)
            if victim is sequence:
                return False
        return self._tables.grow(sequence)

    def _make_way(self) -> bool:
        """Preempt the youngest sequence if prompts hold one another's blocks and no step will free any."""
        if self._in_flight or len(self._running) < 2 or not self._prompts:
            return False
        if any(prompt.next_tokens > 0 for prompt in self._prompts):
            return False
        self._preempt(self._youngest())
        return True

    def _preempt_for(self, first: Sequence) -> bool:
        """Preempt the youngest sequence that stays behind ``first``, if such sequences hold what ``first`` lacks.

        Return whether one was preempted. The next one is preempted once the steps in flight have freed its blocks.
        """
        lower = [each for each in self._running.values() if self._stays_behind(each, first)]
        if not lower or self._tables.draining_blocks:
            return False
        if not self._tables.would_fit(first, without=lower, running=len(self._running) - len(lower)):
            return False
        self._preempt(max(lower, key=lambda candidate: candidate.arrival))
        return True

    def _stays_behind(self, sequence: Sequence, first: Sequence) -> bool:
        """Whether a running sequence, if it were preempted, would wait behind ``first``."""
        rises = sequence.preemptions + 1 >= _MAX_PREEMPTED and sequence.arrival < first.arrival
        return sequence.priority > first.priority and not rises

    def _youngest(self) -> Sequence:
        return max(self._running.values(), key=lambda candidate: (candidate.priority, candidate.arrival))

    def _add_prefills(self, draft: Draft, budget: int) -> None:
        if not self._may_prefill(draft):
            return
        self._fill_windows()
        if budget > 0 and len(self._waiting):
            self._admit_waiting()
        elif len(self._waiting) and (first := self._next_to_admit) is not None:
            self._preempt_for(first)
        most = self._most_chunk_tokens
        for sequence, num_tokens in self._prompts.share(budget, replays=draft.replays):
            if draft.may_begin(sequence):  # the oldest comes first and always fits
                self._add_chunk(draft, sequence, min(num_tokens, most))

    @property
    def _most_chunk_tokens(self) -> int:
        """Tokens of one sequence in a step, so that its chunks in all steps in flight fit into the windows' slack."""
        return max(1, self._limits.slack_tokens // self.prompt_steps)

    def _fill_windows(self) -> None:
        """Allocate blocks for prompts that have none for their next token."""
        for prompt in self._prompts if self._limits.windows else ():
            if not prompt.next_tokens:
                self._tables.fill_windows(prompt)

    def _add_chunk(self, draft: Draft, sequence: Sequence, num_tokens: int) -> None:
        draft.add_chunk(sequence, num_tokens)
        self._unscheduled_prefill -= num_tokens
        if not sequence.unscheduled:
            self._prompts.remove(sequence)
            self._head_does_not_fit = False
            sequence.phase = Phase.DECODE
            self._num_decodes += not sequence.alone

    def _wait(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)
        self._head_does_not_fit = False

    def _admit_waiting(self) -> None:
        """Admit sequences from the head of the queue that can be computed side by side, until one does not fit.

        No sequence passes one that does not fit. A sequence whose first tokens another is computing waits for them, and
        others pass it meanwhile.
        """
        if settled := self._tables.take_settled():
            self._waiting.wake(settled)
            self._head_does_not_fit = False
        if self._head_does_not_fit and not self._tables.may_fit_now:
            return
        while (first := self._next_to_admit) is not None:
            if first.in_flight:
                return  # preempted: its last token is not known yet
            if (key := self._tables.awaited(first)) is not None:
                self._wait_for(first, key)
            elif not self._admit(first) and not (self._tables.lacked_room and self._preempt_for(first)):
                self._head_does_not_fit = True
                return

    @property
    def _next_to_admit(self) -> Sequence | None:
        """The first in the queue, if it would be computed soon once its blocks are allocated."""
        first = self._waiting.first()
        return first if first is not None and self._prompts.accepts(first) else None

    def _wait_for(self, sequence: Sequence, key: Key) -> None:
        """Park a sequence until the block is computed. The computing sequence inherits a higher priority."""
        self._waiting.park(key)
        owner = self._tables.await_key(key)
        if owner is not None:
            self._running[owner].priority = min(self._running[owner].priority, sequence.priority)

    def _admit(self, sequence: Sequence) -> bool:
        """Admit the first sequence in the queue with blocks for all its known tokens, so that its prefill cannot stall.

        Free blocks remain for running sequences: admitting a sequence only to preempt it does work twice. More remain
        beside other prompts, because its turn comes later.
        """
        if not self._tables.admit(sequence, running=len(self._running), beside_prompts=bool(self._prompts)):
            return False
        self._waiting.pop()
        self._unscheduled_prefill -= sequence.scheduled
        sequence.phase = Phase.PREFILL
        self._running[sequence.sequence] = sequence
        self._prompts.add(sequence)
        return True

    # Life cycle of a sequence

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
            priority=Priority(spec.priority),
            reuse_prefix=spec.reuse_prefix,
            alone=spec.alone,
            registration_base_bytes=spec.registration_base_bytes,
            registration_token_bytes=spec.registration_token_bytes,
        )

    def _check_length(self, prompt_tokens: int) -> None:
        if prompt_tokens < self._limits.max_tokens:
            return
        short_of_memory = self._limits.max_tokens < self._limits.context_length
        raise PromptTooLong(
            f"This model's maximum context length is {self._limits.max_tokens} tokens"
            + (" in the memory of the cluster" if short_of_memory else ""),
            fact=f"the prompt has {prompt_tokens}, and the answer needs at least one",
            next_step="shorten the prompt" + (" or add a node with memory" if short_of_memory else ""),
        )

    def _computed(self, sequence: Sequence, end: int) -> None:
        """Record that a step with the sequence's tokens up to ``end`` retired."""
        sequence.in_flight -= 1
        if end >= sequence.next_full:
            self._tables.note_computed(sequence, end)

    def _clear(self, sequence: Sequence) -> None:
        """Lift the mark of a suspected sequence: an isolated step has sampled a token."""
        if sequence.alone:
            sequence.alone = False
            self._num_decodes += sequence.phase is Phase.DECODE

    def _release_if_idle(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that has left, once no step uses them."""
        if not sequence.in_flight and sequence.phase in (Phase.WAITING, Phase.ENDED):
            self._tables.release(sequence)
            self._head_does_not_fit = False

    def _append(self, sequence: Sequence, token_id: int, events: list[Event]) -> None:
        if sequence.phase is Phase.ENDED:
            return  # cancelled meanwhile: drop the token
        tokens = sequence.tokens
        events.append(TokenSampled(sequence.sequence, len(tokens) - sequence.prompt_tokens, token_id))
        tokens.append(token_id)
        if sequence.phase is Phase.WAITING:
            self._unscheduled_prefill += 1  # preempted meanwhile: the token counts and is computed again with the rest
        if token_id in sequence.stop_ids:
            self._end(sequence, EndReason.STOP, events)
        elif len(tokens) >= sequence.limit:
            self._end(sequence, sequence.limit_reason, events)
        elif sequence.phase is Phase.DECODE:
            self._ready.append(sequence)

    def _end_reason(self, sequence: Sequence) -> EndReason | None:
        tokens = sequence.tokens
        if tokens[-1] in sequence.stop_ids and len(tokens) > sequence.prompt_tokens:
            return EndReason.STOP
        return sequence.limit_reason if len(tokens) >= sequence.limit else None

    def _preempt(self, sequence: Sequence) -> None:
        """Requeue a sequence and free its blocks. It later recomputes the tokens that the cache has lost."""
        self._preemptions += 1
        sequence.preemptions += 1
        if sequence.preemptions >= _MAX_PREEMPTED:
            sequence.priority = Priority.INTERACTIVE
        self._leave_running(sequence)
        sequence.scheduled = 0
        self._unscheduled_prefill += len(sequence.tokens)
        self._wait(sequence)
        self._tables.release(sequence)

    def _end(self, sequence: Sequence, reason: EndReason, events: list[Event]) -> None:
        waits = sequence.phase is Phase.WAITING
        if waits:
            self._unscheduled_prefill -= sequence.unscheduled
        else:
            self._leave_running(sequence)
        sequence.phase = Phase.ENDED
        if waits:
            self._waiting.note_ended()
            self._head_does_not_fit = False
        del self._sequences[sequence.sequence]
        cached = sequence.cached_prompt_tokens
        events.append(SequenceEnded(sequence.sequence, reason, sequence.num_output, cached_prompt_tokens=cached))
        self._tables.release(sequence)

    def _leave_running(self, sequence: Sequence) -> None:
        self._head_does_not_fit = False
        del self._running[sequence.sequence]
        self._tables.leave(sequence)
        if sequence.phase is Phase.PREFILL:
            self._prompts.remove(sequence)
            self._unscheduled_prefill -= sequence.unscheduled
        elif not sequence.alone:
            self._num_decodes -= 1
            if sequence in self._ready:
                self._ready.remove(sequence)
