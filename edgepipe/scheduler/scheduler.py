"""The scheduler: decides which step computes which tokens. See docs/architecture/scheduler.md.

Iteration-level continuous batching from one FIFO pool of ready sequences. A sequence has at most one in-flight step
that samples, and some that are planned ahead to follow it; earlier chunks of its prompt may precede it in flight.
Prompts are computed side by side. A suspected sequence (``SequenceSpec.alone``) gets isolated steps until one of them
has sampled a token. The driver calls ``next_step`` until it returns None, and again after every ``submit``, ``cancel``
and ``retire``.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from edgepipe.backend.drafting import NO_DRAFTS, Drafts
from edgepipe.backend.types import TierMove
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler.admission import SequenceAdmission
from edgepipe.scheduler.batch_mode import BatchMode
from edgepipe.scheduler.batch_ways import BatchWay
from edgepipe.scheduler.disk_works import DiskWork
from edgepipe.scheduler.draft_windows import DraftWindows
from edgepipe.scheduler.drafting import Drafting, DraftStats
from edgepipe.scheduler.held_places import Takeover
from edgepipe.scheduler.host_tier import GivenBack
from edgepipe.scheduler.in_flight import InFlight, StepsInFlight
from edgepipe.scheduler.kept_pools import KeptPools
from edgepipe.scheduler.lengths import AnswerLengths, Lengths
from edgepipe.scheduler.limits import SchedulerLimits, SchedulerStats
from edgepipe.scheduler.pacing import Chunk, Pacer
from edgepipe.scheduler.place_keys import PlaceKey
from edgepipe.scheduler.policy import Policy, StepBudget
from edgepipe.scheduler.sequence import Phase, Sequence
from edgepipe.scheduler.sequence_pool import SequencePool
from edgepipe.scheduler.step_bounds import StepBounds
from edgepipe.scheduler.step_builder import StepBuilder
from edgepipe.scheduler.tables import BlockTables
from edgepipe.scheduler.turns_ahead import TurnsAhead
from edgepipe.scheduler.types import Event, ScheduledStep, SequenceSpec

_DECODE = Phase.DECODE  # looked up for each token


class Scheduler:
    """Owns the sequences, the block tables of the whole pipeline, and the schedule."""

    def __init__(self, limits: SchedulerLimits, policy: Policy, *, tables: BlockTables | None = None) -> None:
        """``tables``: empty ones, with the same limits; None: made here."""
        self._limits = limits  # but M, which may change
        self._tables = tables if tables is not None else BlockTables(limits)
        self._pool = SequencePool(limits, self._tables)
        self._waiting, self._running = self._pool.waiting, self._pool.running
        self._prompts, self._ready = self._pool.prompts, self._pool.ready
        self._steps = StepsInFlight()
        self._mode = BatchMode(limits, policy, self._pool, self._tables)
        self._admission = SequenceAdmission(self._pool, self._tables, windows=bool(limits.windows))
        self._bounds = StepBounds(limits, self._mode, self._pool, self._tables, self._steps)
        self._windows = DraftWindows(limits, self._pool, self._tables, self._steps)
        self._ahead = TurnsAhead(self._pool, self._tables, self._steps, self._windows)
        self._plans_ahead = False
        self._adopted = False  # whether this is an engine's first epoch, and stages held something
        self._last_step = 0
        self._moves_behind: tuple[TierMove, ...] = ()  # replays' moves for the stages behind, with the next step
        self._replayed_last = False  # whether the newest shared step holds replayed tokens
        self._isolated_last = False  # whether the newest step is isolated

    # From epoch to epoch

    def hand_over(self) -> KeptPools:
        """Return the KV cache that retired steps left, for the next epoch's scheduler. Call this last."""
        return self._tables.carry_over(self._moves_in_flight())

    def _moves_in_flight(self) -> list[TierMove]:
        """Return the moves of steps that not all stages have performed for certain."""
        return [*[move for record in self._steps.records for move in record.moves], *self._moves_behind]

    def take_over(self, pools: KeptPools) -> None:
        """Start with the previous epoch's KV cache, before any ``submit``.

        The caller has marked lost blocks with ``KeptPools.lose``. Raises ValueError if a number of blocks differs.
        """
        self._tables.take_over(pools)

    def adopt(self, found: Takeover) -> None:
        """Start with what stages hold, of an engine that has ended, before any ``submit``."""
        self._adopted = True
        self._tables.adopt(found)

    # Input

    def submit(self, specs: Seq[SequenceSpec], *, accepted: bool = False) -> list[Event]:
        """Queue sequences of one request: all or none.

        A sequence that an earlier attempt completed ends at once. Raises PromptTooLong, and QueueFull unless
        ``accepted``: a previous epoch accepted them.
        """
        carried = accepted and not self._adopted  # this engine has computed nothing for them
        return self._pool.submit(specs, accepted=accepted, carried=carried)

    def cancel(self, sequence_id: SequenceId, *, at_position: int = 0) -> list[Event]:
        """End a sequence at output position ``at_position``, at once if it is reached. Ignores ended sequences."""
        return self._pool.cancel(sequence_id, at_position=at_position)

    def set_micro_batches(self, micro_batches: int) -> None:
        """Change M; steps in flight beyond it retire normally."""
        if micro_batches < 1:
            raise ValueError("at least one step is in flight")
        self._bounds.micro_batches = micro_batches

    def set_pacer(self, pacer: Pacer) -> None:
        """Set what chooses the size and number of prompt chunks. Without it, M steps with prompt tokens may go."""
        self._bounds.pacer = pacer

    def set_batch_way(self, way: BatchWay) -> None:
        """Set how steps are filled while only batch sequences are in the ring. Without it, like all others."""
        self._mode.set_way(way)

    def plan_ahead(self) -> None:
        """Plan steps that begin with the tokens of steps in flight from now on, because the stages can do that."""
        self._plans_ahead = True

    def set_turns_ahead(self, turns: int) -> None:
        """Set how many steps may be planned behind the one that is computed. They are planned several at a time."""
        self._ahead.turns = turns

    def set_drafting(self, drafting: Drafting) -> None:
        """Set what chooses windows of drafts. Without it, no drafts are wanted."""
        self._windows.drafting = drafting

    # On the stages

    def take_keys(self) -> tuple[PlaceKey, ...]:
        """Return the keys that no step has carried to the stages, once no step is in flight."""
        return () if self._steps.records else self._tables.take_keys()

    def bound_host(self, permille: int) -> None:
        """Use only this share of host memory's places from now on. Then call ``next_given_back``."""
        self._tables.bound_host(permille)

    def next_given_back(self) -> GivenBack | None:
        """Return the next places in host memory whose memory all stages give back to the system, or None.

        Call it after ``next_step`` has returned None. Stages obey in the order of steps and this.
        """
        if not self._tables.any_over:
            return None
        return self._tables.give_back([*self._moves_in_flight(), *self._tables.waiting_moves])

    @property
    def disk_again_s(self) -> float | None:
        """When a disk that rests is tried again, on the clock of ``disk_done``; None: none rests."""
        return self._tables.disk.again_s if self._tables.disk is not None else None

    def next_disk_work(self, *, now_s: float = 0.0) -> DiskWork | None:
        """Return the next work for the disks of all stages, or None. Call it after ``next_step`` has returned None.

        ``now_s``: the present time of any monotonic clock, the same for ``disk_done``.
        """
        if (disk := self._tables.disk) is None or not disk.may_begin(now_s):
            return None
        unsettled = [*self._moves_in_flight(), *self._tables.waiting_moves]
        return disk.next(unsettled, idle=not self._steps.records, now_s=now_s)

    def disk_done(
        self,
        number: int,
        *,
        failed: Collection[int] = (),
        seconds: float = 0.0,
        problem: str = "",
        now_s: float = 0.0,
    ) -> None:
        """See ``DiskWorks.done``. Then call ``next_step`` again."""
        if self._tables.disk is not None:
            self._tables.disk.done(number, failed=failed, seconds=seconds, problem=problem, now_s=now_s)
            self._pool.head_does_not_fit = False

    # Output

    def next_step(self) -> ScheduledStep | None:
        """Return the next step to send, or None if nothing is ready or fits.

        At most M steps in flight hold decodes, and at most P hold prompt tokens. A step may hold both. A step that is
        planned ahead counts once the step that it follows has retired. Suspected sequences take turns with all others,
        so both kinds together then have the larger of M and P.
        """
        pool, bounds = self._pool, self._bounds
        pending = bool(self._prompts or self._ready or len(self._waiting))
        if not (pending or self._plans_ahead):
            return None
        if self._prompts.any_suspected and len(self._steps.records) >= max(bounds.micro_batches, bounds.prompt_steps):
            return None
        bounds.choose_beside_chats()
        builder: StepBuilder | None = None
        if pending or self._mode.has_way:
            preemptions = pool.preemptions
            builder = self._fill()
            # Again if the budget was for sequences that were preempted, or if no prompt has blocks for its next tokens.
            while builder is None and (pool.preemptions > preemptions or self._make_way() or self._end_prompts()):
                preemptions = pool.preemptions
                builder = self._fill()
        if builder is None and self._plans_ahead:
            builder = self._next_turn()
        if builder is None:
            return None
        self._last_step += 1
        bounds.note_sent(decodes=bool(builder.decodes))
        self._isolated_last = builder.isolated
        if not builder.isolated:
            self._replayed_last = builder.replays
        self._tables.note_sent(builder.copies)
        home = self._plans_ahead and not builder.replays and not builder.windows and not builder.lot
        moves = self._tables.take_moves()
        keys = self._tables.take_keys()
        scheduled = builder.finish(StepId(self._last_step), self._tables.pop_frees(), moves, keys, home=home)
        performed = self._moves_behind + moves
        self._moves_behind = ()
        if builder.replays:
            self._moves_behind, performed = performed, ()
        record = InFlight(
            scheduled.step,
            builder.decodes,
            builder.chunks,
            builder.copies,
            performed,
            len(builder.decodes) + sum([samples for _, _, samples in builder.chunks]),  # chunks sample one token
            builder.isolated,
            builder.after,
            scheduled.home,
            builder.windows,
            self._windows.rows_of(builder),
            lot=builder.lot,
            assumed=builder.assumed,
        )
        self._steps.add(record)
        return scheduled

    def retire(
        self, step: StepId, ids: Seq[Seq[int]], drafts: Seq[Drafts] = (), *, now_s: float | None = None
    ) -> list[Event]:
        """Complete a step in flight.

        ids     the sampled tokens of each sampling row, in row order
        drafts  what may follow them, row by row; empty: nothing
        now_s   the present time of any clock; None: turns are not measured

        A row gives one token at least. One that gives none has failed, and the caller cancels its sequence next; or its
        step is ``assumed``, and its sequence went another way. What comes behind the end of a sequence is dropped.
        Steps of one sequence complete in the order of ``next_step``.
        """
        record = self._steps.take(step, num_rows=len(ids))
        pool = self._pool
        pool.now_s = now_s
        self._bounds.note_retired()
        if record.copies:
            self._tables.note_copied(record.copies)
            pool.head_does_not_fit = False
        events: list[Event] = []
        if record.lot or record.windows:
            self._windows.note_windows(record, ids)
        if now_s is not None and pool.num_chats and record.decodes and not record.lot:
            self._bounds.note_turn(record, now_s)
        for sequence, sampled in zip(record.decodes, ids, strict=False):  # ids of the chunks come after
            sequence.in_flight -= 1
            if not record.void:
                if len(sequence.tokens) >= sequence.next_full:
                    self._tables.note_computed(sequence, len(sequence.tokens))
                pool.append(sequence, sampled, events)
            if sequence.phase is not _DECODE:
                pool.release_if_idle(sequence)
        rows = iter(ids[len(record.decodes) :])
        for sequence, end, samples in record.chunks:
            sequence.in_flight -= 1
            if end >= sequence.next_full:
                self._tables.note_computed(sequence, end)
            if samples:
                pool.clear(sequence)
                pool.append(sequence, next(rows), events)
            pool.release_if_idle(sequence)
        self._windows.note_drafts(record, ids, drafts)
        return events

    def add_drafts(self, sequence_id: SequenceId, drafts: Drafts, *, position: int, step: StepId) -> None:
        """Take drafts of a sequence's tokens from ``position`` on, made when the tokens of ``step`` were the newest.

        Then call ``next_step`` again: they may fill its next window in flight.
        """
        sequence = self._pool.sequences.get(sequence_id)
        if sequence is not None and sequence.drafts.flight is not None:
            sequence.drafts.chain.add(drafts, position=position, step=step, known=sequence.tokens)

    def tokens(self, sequence_id: SequenceId) -> Seq[int]:
        """Return the known tokens, prompt and output, of a sequence that has not ended."""
        return self._pool.sequences[sequence_id].tokens

    def batch_lengths(self) -> list[Lengths]:
        """Return the lengths of the newest ended batch sequences, and expected ones of those that run.

        Short answers end first: without those that run, the lengths would be too short.
        """
        return self._pool.batch_lengths()

    @property
    def answer_lengths(self) -> AnswerLengths:
        """Lengths of ended batch sequences."""
        return self._pool.answer_lengths

    @property
    def num_sequences(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._pool.sequences)

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
        return self._bounds.chunk

    @property
    def micro_batches(self) -> int:
        """M."""
        return self._bounds.micro_batches

    def draft_stats(self) -> DraftStats:
        """Return the current counts of drafts."""
        return self._windows.stats()

    def stats(self) -> SchedulerStats:
        """Return the current counts."""
        states, host, works = self._tables.states, self._tables.host, self._tables.disk
        disk = host.disk if host is not None else None
        return SchedulerStats(
            micro_batches=self._bounds.micro_batches,
            in_flight=len(self._steps.records),
            running=len(self._running),
            waiting=len(self._waiting),
            num_blocks=self._tables.num_blocks,
            free_blocks=self._tables.free_blocks,
            state_slots=states.num_slots if states is not None else 0,
            free_slots=states.free_slots if states is not None else 0,
            missed_snapshots=states.missed if states is not None else 0,
            cached_blocks=self._tables.cached_blocks,
            preemptions=self._pool.preemptions,
            admitted_tokens=self._tables.admitted_tokens,
            cached_tokens=self._tables.cached_tokens,
            kept_tokens=self._tables.kept_tokens,
            replayed_tokens=self._tables.replayed_tokens,
            host_blocks=host.num_places if host is not None else 0,
            host_bound=host.bound if host is not None else 0,
            used_host_blocks=host.used_places if host is not None else 0,
            restored_tokens=self._tables.restored_tokens,
            disk_blocks=disk.num_places if disk is not None else 0,
            used_disk_blocks=disk.used_places if disk is not None else 0,
            fetched_tokens=works.num_fetched * self._limits.block_size if works is not None else 0,
            disk_problem=works.problem if works is not None else "",
            disk_again_s=works.again_s if works is not None else None,
        )

    # Filling a step

    def _fill(self) -> StepBuilder | None:
        """Alternate isolated and shared steps while there is work for both. Return None if no row is ready."""
        bounds = self._bounds
        self._mode.choose(micro_batches=bounds.micro_batches)
        bounds.choose()
        if bounds.full:
            return None
        if self._prompts.any_suspected and not self._isolated_last:
            builder = self._fill_isolated()
            if not builder.empty:
                return builder
        builder = self._fill_shared()
        if builder.empty and self._prompts.any_suspected:
            builder = self._fill_isolated()
        return None if builder.empty else builder

    def _fill_isolated(self) -> StepBuilder:
        """Fill a step with one suspected sequence that has blocks. Each of k such gets one of the next 2k steps."""
        self._admission.fill_windows()
        sequence = self._prompts.next_suspected()
        if sequence is None:
            return self._new_builder(isolated=True)
        builder = self._new_builder(self._tables.stale_to if sequence.replays else None, isolated=True)
        num_tokens = min(sequence.next_tokens, self._isolated_tokens(), self._bounds.most_chunk_tokens)
        self._add_chunk(builder, sequence, num_tokens)
        return builder

    def _isolated_tokens(self) -> int:
        """Return the usual prefill budget; if that is 0, the budget without decodes."""
        load = self._bounds.load()
        if tokens := self._mode.policy.budget(load).prefill_tokens:
            return tokens
        nothing_else = load._replace(sampling_rows_in_flight=(), running_decodes=0, ready_decodes=0)
        return self._mode.policy.budget(nothing_else).prefill_tokens

    def _fill_shared(self) -> StepBuilder:
        budget = self._mode.policy.budget(self._bounds.load())
        if (last_slice := self._tables.stale_to) is not None:
            return self._fill_replay_or_whole(budget, last_slice)
        return self._fill_whole(budget)

    def _fill_whole(self, budget: StepBudget) -> StepBuilder:
        builder = self._new_builder()
        if self._bounds.may_decode:
            self._add_decodes(builder, budget.decode_rows)
        self._add_prefills(builder, budget.prefill_tokens)
        return builder

    def _fill_replay_or_whole(self, budget: StepBudget, last_slice: int) -> StepBuilder:
        """Alternate steps of replayed tokens and steps through all slices while there is work for both."""
        builder = self._fill_whole(budget) if self._replayed_last else self._new_builder()
        if builder.empty:
            builder = self._new_builder(last_slice)
            self._add_prefills(builder, budget.prefill_tokens)
        return self._fill_whole(budget) if builder.empty else builder

    def _next_turn(self) -> StepBuilder | None:
        """Return a step behind one in flight, if nothing else can be computed.

        Not beside other micro-batches, which keep the stages busy meanwhile: the work on the hosts would slow them.
        """
        if self._bounds.micro_batches == 1 and self._bounds.only_decodes_go:
            return self._ahead.next()
        self._ahead.stop()
        return None

    def _new_builder(self, last_slice: int | None = None, *, isolated: bool = False) -> StepBuilder:
        return StepBuilder(last_slice=last_slice, isolated=isolated, states=self._tables.states)

    def _add_decodes(self, builder: StepBuilder, budget: int) -> None:
        deferred: list[Sequence] = []  # they wait for blocks of steps in flight
        held_back: list[Sequence] = []  # sequences of batches that wait because of chats
        ready = self._ready
        windows, beside = self._windows, self._windows.rows_beside(min(budget, len(ready)))
        may_fly = self._plans_ahead and self._bounds.micro_batches == 1
        bound = self._bounds.beside_chats
        batch_rows = bound.rows if bound is not None else None
        while ready and budget > 0:
            sequence = ready.popleft()
            if batch_rows is not None and sequence.is_batch:
                if not batch_rows:
                    held_back.append(sequence)
                    continue
                batch_rows -= 1
            if len(sequence.tokens) <= sequence.room or self._admission.grow(sequence, promised=len(deferred)):
                if beside is not None:
                    beside = windows.add_decode(builder, sequence, beside, promised=len(deferred), may_fly=may_fly)
                else:
                    if sequence.drafts.found:
                        sequence.drafts.found, sequence.drafts.next = False, NO_DRAFTS
                    builder.add_decode(sequence)
                budget -= 1
            else:
                deferred.append(sequence)
                # A deferred sequence may be preempted meanwhile.
                deferred = [waiting for waiting in deferred if waiting.phase is Phase.DECODE]
        if deferred or held_back:
            for waiting in (*reversed(held_back), *reversed(deferred)):
                if waiting.phase is Phase.DECODE:
                    ready.appendleft(waiting)

    def _make_way(self) -> bool:
        return not self._steps.records and self._admission.make_way()

    def _end_prompts(self) -> bool:
        in_flight = bool(self._steps.records)
        return self._mode.end_prompts(micro_batches=self._bounds.micro_batches, in_flight=in_flight)

    def _add_prefills(self, builder: StepBuilder, budget: int) -> None:
        beside_decodes = bool(builder.decodes)
        if not self._pool.unscheduled_prefill or not self._bounds.may_prefill(beside_decodes=beside_decodes):
            return
        self._admission.fill_windows()
        if len(self._waiting):
            phases = self._mode.prompt_phases
            if budget > 0:
                self._admission.admit_waiting(phases, carried=beside_decodes or bool(self._prompts))
            else:
                self._admission.make_room(phases)
        most = self._bounds.most_chunk_tokens
        first_only = self._bounds.beside_chats is not None
        for sequence, num_tokens in self._prompts.share(budget, replays=builder.replays, first_only=first_only):
            if builder.may_begin(sequence):  # the oldest comes first and always fits
                self._add_chunk(builder, sequence, min(num_tokens, most))

    def _add_chunk(self, builder: StepBuilder, sequence: Sequence, num_tokens: int) -> None:
        wanted = 0
        if num_tokens == sequence.unscheduled:
            wanted = self._windows.wanted(sequence, self._windows.rows_beside(1))
        sequence.drafts.next = NO_DRAFTS
        builder.add_chunk(sequence, num_tokens, wanted=wanted)
        self._pool.note_chunk(sequence, num_tokens)
