"""The scheduler: decides which step computes which tokens. See docs/architecture/scheduler.md.

Iteration-level continuous batching from one FIFO pool of ready sequences. A sequence has at most one in-flight step
that samples, and some that are planned ahead to follow it; earlier chunks of its prompt may precede it in flight.
Prompts are computed side by side. A suspected sequence (``SequenceSpec.alone``) gets isolated steps until one of them
has sampled a token. The driver calls ``next_step`` until it returns None, and again after every ``submit``, ``cancel``
and ``retire``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import replace

from edgepipe.backend.drafting import NO_DRAFTS, Drafts
from edgepipe.backend.types import TierMove
from edgepipe.errors import PromptTooLong, QueueFull
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler.batch_ways import BatchWay
from edgepipe.scheduler.disk_works import DiskWork
from edgepipe.scheduler.drafting import Drafting, DraftStats, Share
from edgepipe.scheduler.flights import windows_may_fly
from edgepipe.scheduler.held_places import Takeover
from edgepipe.scheduler.host_tier import GivenBack
from edgepipe.scheduler.in_flight import InFlight, StepCounts
from edgepipe.scheduler.kept_pools import KeptPools
from edgepipe.scheduler.kv import Key
from edgepipe.scheduler.lengths import AnswerLengths, Lengths
from edgepipe.scheduler.limits import SchedulerLimits, SchedulerStats
from edgepipe.scheduler.pacing import BesideChats, Chunk, Pacer, Waiting
from edgepipe.scheduler.phases import Phases, Refill, Turn
from edgepipe.scheduler.policy import Load, Policy, StepBudget
from edgepipe.scheduler.prompts import Prompts
from edgepipe.scheduler.queue import WaitingQueue
from edgepipe.scheduler.sequence import Phase, Sequence
from edgepipe.scheduler.step_builder import StepBuilder
from edgepipe.scheduler.tables import BlockTables
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
_FEW_TURNS = 2  # of so many steps ahead at most, the next ones are planned once none is left, of more once one is left
_TURNS_WITHOUT_DRAFTS = 16  # after so many turns without drafts, steps are planned as if none came
_TURNS_ALONE = 8  # without batches, one of so many turns of chats is measured: a forecast takes time
_CHATS_RETURN_S = 10.0  # batches stay as small as beside a chat for so long after the last one: its reader may go on
_DECODE = Phase.DECODE  # looked up for each token


class Scheduler:
    """Owns the sequences, the block tables of the whole pipeline, and the schedule."""

    def __init__(self, limits: SchedulerLimits, policy: Policy) -> None:
        self._plans_ahead = False
        self._turns_ahead = 1  # steps that are planned ahead of the one that is computed, at most
        self._extends = False  # whether the steps planned ahead are being made as many as may be
        self._limits = limits
        self._policy = policy
        self._tables = BlockTables(limits)
        self._adopted = False  # whether this is an engine's first epoch, and stages held something
        self._sequences: dict[SequenceId, Sequence] = {}  # sequences that have not ended
        self._waiting = WaitingQueue()
        self._running: dict[SequenceId, Sequence] = {}  # admitted
        self._prompts = Prompts()  # admitted with unscheduled tokens
        self._ready: deque[Sequence] = deque()  # decodes without a step in flight, in the order of becoming ready
        self._num_decodes = 0  # suspected sequences are not counted
        self._head_does_not_fit = False  # the first in the queue was not admitted, and nothing changed since
        self._unscheduled_prefill = 0  # tokens, of waiting and prefilling sequences
        self._in_flight: deque[InFlight] = deque()
        self._steps = StepCounts()  # of the steps in flight
        self._pacer: Pacer | None = None
        self.answer_lengths = AnswerLengths()  # of batch sequences
        self._way: BatchWay | None = None
        self._turn = Turn.MIXED
        self._num_chats = 0  # sequences that have not ended and were submitted as interactive
        self._now_s: float | None = None  # of the newest step that retired; None: turns are not measured
        self._chats_until_s = 0.0  # until then a chat may come back
        self._drafting: Drafting | None = None
        self._chunk: Chunk | None = None  # newest choice of the pacer
        self._beside_chats: BesideChats | None = None  # newest choice of what batches may decode; None without a bound
        self._decode_steps = limits.micro_batches  # most steps in flight with decodes
        self._prompt_slot = False  # whether fewer than P steps in flight hold prompt tokens
        self._may_add_chunk = True  # whether a step of prompts alone may join those in flight while sequences decode
        self._last_step = 0
        self._arrivals = 0
        self._preemptions = 0
        self._computed_tokens = 0
        self._moves_behind: tuple[TierMove, ...] = ()  # of replays: the stages behind perform them with the next step
        self._replayed_last = False  # whether the newest shared step holds replayed tokens
        self._isolated_last = False  # whether the newest step is isolated

    # From epoch to epoch

    def hand_over(self) -> KeptPools:
        """Return the KV cache that retired steps left, for the next epoch's scheduler. Call this last."""
        return self._tables.carry_over(self._moves_in_flight())

    def _moves_in_flight(self) -> list[TierMove]:
        """Return the moves of steps that not all stages have performed for certain."""
        return [*[move for record in self._in_flight for move in record.moves], *self._moves_behind]

    def take_over(self, pools: KeptPools) -> None:
        """Start with the previous epoch's KV cache, before any ``submit``.

        The caller has marked lost blocks with ``KeptPools.lose``. Raises ValueError if a number of blocks differs.
        """
        self._tables.take_over(pools)

    def adopt(self, found: Takeover) -> None:
        """Start with what stages hold below the device, of an engine that has ended, before any ``submit``."""
        self._adopted = True
        self._tables.adopt(found)

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
            sequence.carried = accepted and not self._adopted  # this engine has computed nothing for it
            reason = self._end_reason(sequence) if spec.generated else None
            if reason is None:
                self._sequences[spec.sequence] = sequence
                self._num_chats += not sequence.is_batch
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
        if micro_batches != self._limits.micro_batches:
            self._limits = replace(self._limits, micro_batches=micro_batches)

    def set_pacer(self, pacer: Pacer) -> None:
        """Set what chooses the size and number of prompt chunks. Without it, M steps with prompt tokens may go."""
        self._pacer = pacer

    def set_batch_way(self, way: BatchWay) -> None:
        """Set how steps are filled while only batch sequences are in the ring. Without it, like all others."""
        self._way, self._turn = way, Turn.MIXED

    def plan_ahead(self) -> None:
        """From now on, plan steps that begin with the tokens of steps in flight, because the stages can do that."""
        self._plans_ahead = True

    def set_turns_ahead(self, turns: int) -> None:
        """Set how many steps may be planned behind the one that is computed. They are planned several at a time."""
        self._turns_ahead = turns

    def set_drafting(self, drafting: Drafting) -> None:
        """Set what chooses windows of drafts. Without it, no drafts are wanted."""
        self._drafting = drafting

    # Below the device

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
        return disk.next(unsettled, idle=not self._in_flight, now_s=now_s)

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
            self._head_does_not_fit = False

    # Output

    def next_step(self) -> ScheduledStep | None:
        """Return the next step to send, or None if nothing is ready or fits.

        At most M steps in flight hold decodes, and at most P hold prompt tokens. A step may hold both. A step that is
        planned ahead counts once the step that it follows has retired. Suspected sequences take turns with all others,
        so both kinds together then have the larger of M and P.
        """
        prompts = self._prompts
        if not (prompts or self._ready or len(self._waiting) or self._plans_ahead):
            return None
        if prompts.any_suspected and len(self._in_flight) >= max(self._limits.micro_batches, self.prompt_steps):
            return None
        self._beside_chats = self._choose_beside_chats() if self._chats_beside_batches else None
        builder: StepBuilder | None = None
        if prompts or self._ready or len(self._waiting) or self._way is not None:
            preemptions = self._preemptions
            builder = self._fill()
            # Again if the budget was for sequences that were preempted, or if no prompt has blocks for its next tokens.
            while builder is None and (self._preemptions > preemptions or self._make_way() or self._end_prompts()):
                preemptions = self._preemptions
                builder = self._fill()
        if builder is None and self._plans_ahead:
            builder = self._next_turn()
        if builder is None:
            return None
        self._last_step += 1
        if not builder.decodes:
            self._may_add_chunk = False
        self._isolated_last = builder.isolated
        if not builder.isolated:
            self._replayed_last = builder.replays
        self._tables.note_sent(builder.copies)
        home = self._plans_ahead and not builder.replays and not builder.windows and not builder.lot
        moves = self._tables.take_moves()
        scheduled = builder.finish(StepId(self._last_step), self._tables.pop_frees(), moves, home=home)
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
            len(scheduled.token_ids),
            len(builder.decodes) + sum([samples for _, _, samples in builder.chunks]),  # chunks sample one token
            builder.isolated,
            builder.after,
            scheduled.home,
            builder.windows,
            self._plain_share(len(builder.decodes)) if builder.windows else None,
            lot=builder.lot,
            assumed=builder.assumed,
        )
        self._in_flight.append(record)
        self._steps.add(record, 1)
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
        first = bool(self._in_flight) and self._in_flight[0].step == step
        place = 0 if first else next((at for at, each in enumerate(self._in_flight) if each.step == step), None)
        if place is None:
            raise ValueError(f"step {step} is not in flight")
        self._now_s = now_s
        record = self._in_flight[place]
        if record.num_sampling != len(ids):
            raise ValueError(f"step {step} samples in {record.num_sampling} rows, tokens of {len(ids)} came")
        del self._in_flight[place]
        self._steps.add(record, -1)
        if record.followed:
            next(each for each in self._in_flight if each.after == step).after = None
            self._steps.decodes += 1
        self._may_add_chunk = True
        self._computed_tokens += record.num_tokens
        if record.copies:
            self._tables.note_copied(record.copies)
            self._head_does_not_fit = False
        events: list[Event] = []
        if record.lot:
            self._note_flight(record, ids[0])
        elif record.windows:
            self._note_windows(record, ids)
        if now_s is not None and self._num_chats and self._pacer is not None and record.decodes and not record.lot:
            self._note_turn(self._pacer, record, now_s)
        for sequence, sampled in zip(record.decodes, ids, strict=False):  # ids of the chunks come after
            sequence.in_flight -= 1
            if not record.void:
                if len(sequence.tokens) >= sequence.next_full:
                    self._tables.note_computed(sequence, len(sequence.tokens))
                self._append(sequence, sampled, events)
            if sequence.phase is not _DECODE:
                self._release_if_idle(sequence)
        rows = iter(ids[len(record.decodes) :])
        for sequence, end, samples in record.chunks:
            self._computed(sequence, end)
            if samples:
                self._clear(sequence)
                self._append(sequence, next(rows), events)
            self._release_if_idle(sequence)
        if self._drafting is not None and not record.lot:
            self._note_drafts(record, ids, drafts)
        return events

    def add_drafts(self, sequence_id: SequenceId, drafts: Drafts, *, position: int, step: StepId) -> None:
        """Take drafts of a sequence's tokens from ``position`` on, made when the tokens of ``step`` were the newest.

        Then call ``next_step`` again: they may fill its next window in flight.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and sequence.drafts.flight is not None:
            sequence.drafts.chain.add(drafts, position=position, step=step, known=sequence.tokens)

    def _note_flight(self, record: InFlight, sampled: Seq[int]) -> None:
        """Count the drafts that a window in flight has judged. If its sequence goes another way, void those behind it.

        A window that gave nothing is void itself.
        """
        sequence = record.decodes[0]
        own = sequence.drafts
        sequence.decoded_s, own.newest_turn = 0.0, None  # turns of windows in flight overlap: none is measured
        record.void = record.void or (record.assumed and not sampled)
        if record.void or sequence.phase is Phase.ENDED:
            return
        judged = own.chain.took(record.step, sampled)
        if self._drafting is not None:
            self._drafting.note_flight(own, judged, tokens=len(sampled), ahead=record.assumed, now_s=self._now_s)
        if judged.wrong and sequence.phase is _DECODE:
            sequence.scheduled = len(sequence.tokens)
            for each in self._in_flight:
                if each.assumed and not each.void and each.decodes[0] is sequence:
                    self._void(each)

    def _void(self, record: InFlight) -> None:
        """Let nothing wait for a step whose tokens mean nothing."""
        record.void, record.followed = True, False
        if record.after is None:  # it counts for M no more
            record.after = record.step
            self._steps.decodes -= 1

    def _note_drafts(self, record: InFlight, ids: Seq[Seq[int]], drafts: Seq[Drafts]) -> None:
        """Keep the drafts behind a step's tokens; where a step follows that was planned ahead, only that some came."""
        sampling = record.sampling
        if self._drafting is not None and self._num_decodes == 1 and len(record.decodes) == 1 and not record.chunks:
            own, now_s = record.decodes[0].drafts, self._now_s
            follows = own.newest_turn is not None and own.newest_turn[0] == record.step - 1
            if follows and own.last_source and now_s is not None and own.newest_turn is not None:
                self._drafting.note_single(len(ids[0]), now_s - own.newest_turn[1])
            own.newest_turn = (record.step, now_s) if now_s is not None else None
        for sequence, proposed in zip(sampling, drafts or [NO_DRAFTS] * len(sampling), strict=True):
            sequence.drafts.next = NO_DRAFTS if record.followed else proposed
            sequence.drafts.found = bool(proposed.ids)
            sequence.drafts.without = 0 if proposed.ids else sequence.drafts.without + 1

    def _note_windows(self, record: InFlight, ids: Seq[Seq[int]]) -> None:
        """Count which drafts were right, and keep the states behind them."""
        for row, drafts in record.windows.items():
            sequence, right = record.decodes[row], max(0, len(ids[row]) - 1)
            if self._tables.states is not None:
                self._tables.states.settle_window(sequence, 1 + right)
            if self._drafting is not None and record.share is not None and ids[row]:
                self._drafting.note(sequence.drafts, drafts.sources, accepted=right, share=record.share)

    def tokens(self, sequence_id: SequenceId) -> Seq[int]:
        """Return the known tokens, prompt and output, of a sequence that has not ended."""
        return self._sequences[sequence_id].tokens

    def batch_lengths(self) -> list[Lengths]:
        """Return the lengths of the newest ended batch sequences, and expected ones of those that run.

        Short answers end first: without those that run, the lengths would be too short.
        """
        known = self.answer_lengths
        running = [each for each in self._running.values() if each.is_batch]
        return [*known.newest, *[known.expected(Lengths(each.prompt_tokens, each.num_output)) for each in running]]

    @property
    def num_sequences(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._sequences)

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

    def draft_stats(self) -> DraftStats:
        """Return the current counts of drafts."""
        return self._drafting.stats() if self._drafting is not None else DraftStats()

    def stats(self) -> SchedulerStats:
        """Return the current counts."""
        states, host, works = self._tables.states, self._tables.host, self._tables.disk
        disk = host.disk if host is not None else None
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
        self._choose_turn()
        self._prompt_slot = self._choose_chunk()
        self._decode_steps = self._most_decode_steps()
        if self._is_full:
            return None
        if self._prompts.any_suspected and not self._isolated_last:
            builder = self._fill_isolated()
            if not builder.empty:
                return builder
        builder = self._fill_shared()
        if builder.empty and self._prompts.any_suspected:
            builder = self._fill_isolated()
        return None if builder.empty else builder

    @property
    def _batch_way(self) -> BatchWay | None:
        """How to fill the next step, if only batch sequences are in the ring, none of them suspected or replayed."""
        if self._expected_chats or self._prompts.any_suspected or self._tables.stale_to is not None:
            return None
        return self._way

    @property
    def _step_policy(self) -> Policy:
        if self._way is None:
            return self._policy
        way = self._batch_way
        return self._policy if way is None else way.policy

    @property
    def _phases(self) -> Phases | None:
        way = self._batch_way
        return None if way is None else way.phases

    def _choose_turn(self) -> None:
        """Begin or leave the phases, and change from decodes to prompts when that pays."""
        if self._way is None:
            return
        phases = self._phases
        if phases is None:
            self._turn = Turn.MIXED
        elif self._turn is Turn.MIXED or (self._turn is Turn.DECODES and phases.should_refill(self._refill())):
            self._turn = Turn.PROMPTS
            phases.begin_prompts(self._running.values())

    def _end_prompts(self) -> bool:
        """Change from prompts to decodes if no further prompt can be computed now. Return whether it did."""
        phases = self._phases
        if self._turn is not Turn.PROMPTS or phases is None or self._prompts or not self._num_decodes:
            return False
        if self._waiting.any_parked and self._in_flight:
            return False  # these steps compute blocks that prompts in the queue share
        self._turn = Turn.DECODES
        phases.begin_decodes(self._refill())
        return True

    def _refill(self) -> Refill:
        return Refill(
            decodes=self._num_decodes,
            context=self._mean_context,
            micro_batches=self._limits.micro_batches,
            free_tokens=self._tables.free_blocks * self._limits.block_size,
            free_rows=self._limits.max_running - len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=self._unscheduled_prefill,
        )

    def _choose_chunk(self) -> bool:
        """Choose P and the size of the next step with prompt tokens. Return whether fewer than P are in flight."""
        if not self._unscheduled_prefill:
            return False
        if not self._prompts_go:
            return True
        # Decodes that come back may ride in one step more, for one without decodes that will not be followed.
        more = bool(self._ready) and self._steps.only_chunks > 0
        if self._steps.chunks < self.prompt_steps + more and self._pacer is not None:
            self._chunk = self._pacer.chunk(self._waiting_prompts())
        return self._steps.chunks < self.prompt_steps + more

    @property
    def _prompts_go(self) -> bool:
        """Whether prompts are computed, or the first in the queue may be admitted."""
        if self._turn is Turn.DECODES:
            return False
        return bool(self._prompts) or (len(self._waiting) > 0 and not self._head_does_not_fit)

    def _may_decode(self) -> bool:
        """Whether fewer steps in flight hold decodes than may."""
        return self._turn is not Turn.PROMPTS and self._steps.decodes < self._decode_steps

    def _most_decode_steps(self) -> int:
        """Return M, or P if that is less while prompts wait: decodes that ride with chunks save a read of weights."""
        most = self._limits.micro_batches if self._beside_chats is None else self._beside_chats.in_flight
        if not self._unscheduled_prefill or not self._prompts_go:
            return most
        return min(most, self.prompt_steps) if self.prompt_steps > 1 else most

    @property
    def _is_full(self) -> bool:
        """Whether no row can join those in flight. Most calls of ``next_step`` end here."""
        if self._prompts.any_suspected or (self._ready and self._may_decode()):
            return False
        return not self._may_prefill(beside_decodes=False)

    def _may_prefill(self, *, beside_decodes: bool) -> bool:
        """Whether the step may hold prompt tokens.

        Beside protected decodes, one step without decodes may follow each step that retires: more at once would delay
        the decodes that come back next by more than one chunk.
        """
        spaced = self._chunk is not None and self._chunk.spaced
        if self._turn is Turn.DECODES or (not beside_decodes and self._only_ride):
            return False
        return self._prompt_slot and (beside_decodes or self._may_add_chunk or not spaced)

    @property
    def _only_ride(self) -> bool:
        """Whether prompts go with decodes only: a step of their own would lengthen the turn of chats.

        That holds for prompts of batches, and for short ones while a step with decodes is in flight. Replays cannot
        ride.
        """
        if self._chunk is not None and self._chunk.rides and self._steps.decodes and self._tables.stale_to is None:
            return True
        if self._beside_chats is None or not self._num_decodes:
            return False
        return self._only_batches_wait(self._prompts.oldest or self._waiting.first())

    @property
    def prompt_steps(self) -> int:
        """P: the maximum number of steps in flight with prompt tokens."""
        return self._limits.micro_batches if self._chunk is None else self._chunk.in_flight

    def _waiting_prompts(self) -> Waiting:
        first = self._prompts.oldest or self._waiting.first()
        left = first.unscheduled if first is not None else 0
        chats, decodes = 0, self._num_decodes
        if self._chats_beside_batches:
            chats = sum([self._is_protected(each) and not each.is_batch for each in self._running.values()])
            chats = chats or self._expected_chats - self._num_chats
            if (beside := self._beside_chats) is not None:
                decodes = min(decodes, chats + beside.rows * beside.in_flight)
        return Waiting(
            prompt=first.sequence if first is not None else 0,
            position=self._prompts.furthest_position,
            left=left,
            others=max(0, self._unscheduled_prefill - left),
            decodes=decodes,
            context=self._mean_context,
            micro_batches=self._limits.micro_batches,
            protected=chats > 0 or (self._num_decodes > 0 and any(map(self._is_protected, self._running.values()))),
            chats=chats,
            batch=chats > 0 and self._only_batches_wait(first),
            begun=max(0, first.scheduled - first.cached_prompt_tokens) if first is not None else 0,
        )

    @property
    def _mean_context(self) -> int:
        """Tokens that a running sequence attends to, in the mean, without prompts that are computed."""
        held = (self._tables.num_blocks - self._tables.free_blocks) * self._limits.block_size
        others = len(self._running)
        for prompt in self._prompts:
            held, others = held - len(prompt.tokens), others - 1
        return max(1, held) // max(1, others)

    def _only_batches_wait(self, first: Sequence | None) -> bool:
        """Whether all prompts with tokens to compute, and the ``first`` to do so, belong to batches."""
        return first is not None and first.is_batch and all(prompt.is_batch for prompt in self._prompts)

    @property
    def _chats_beside_batches(self) -> bool:
        """Whether batches have sequences that have not ended, and chats, too, or one may come back soon."""
        return self._num_chats < len(self._sequences) and self._expected_chats > 0

    @property
    def _expected_chats(self) -> int:
        """Chats that have not ended; one if the last one has just left."""
        if self._num_chats or self._now_s is None:
            return self._num_chats
        return int(self._now_s < self._chats_until_s)

    def _choose_beside_chats(self) -> BesideChats | None:
        """Return what batches may decode, so that chats hardly notice them; None without a bound."""
        if self._pacer is None:
            return None
        context, micro_batches = self._mean_context, self._limits.micro_batches
        return self._pacer.beside_chats(self._expected_chats, context=context, micro_batches=micro_batches)

    def _note_turn(self, pacer: Pacer, step: InFlight, now_s: float) -> None:
        """Tell the pacer how long a turn of a chat took, unless prompts of chats have lengthened it."""
        chat = step.decodes[0]
        if chat.is_batch:
            chat = next((each for each in step.decodes if not each.is_batch), None)
        if chat is None:
            return
        before_s, chat.decoded_s = chat.decoded_s, now_s
        beside = self._chats_beside_batches
        if not before_s or (not beside and step.step % _TURNS_ALONE):
            return
        if all(prompt.is_batch for prompt in self._prompts):
            pacer.note_turn(
                now_s - before_s,
                self._num_chats,
                beside=beside,
                context=self._mean_context,
                micro_batches=self._limits.micro_batches,
            )

    @staticmethod
    def _is_protected(sequence: Sequence) -> bool:
        return sequence.phase is Phase.DECODE and sequence.priority is Priority.INTERACTIVE

    def _fill_isolated(self) -> StepBuilder:
        """Fill a step with one suspected sequence that has blocks. Each of k such gets one of the next 2k steps."""
        self._fill_windows()
        sequence = self._prompts.next_suspected()
        if sequence is None:
            return self._new_builder(isolated=True)
        builder = self._new_builder(self._tables.stale_to if sequence.replays else None, isolated=True)
        num_tokens = min(sequence.next_tokens, self._isolated_tokens(), self._most_chunk_tokens)
        self._add_chunk(builder, sequence, num_tokens)
        return builder

    def _isolated_tokens(self) -> int:
        """Return the usual prefill budget; if that is 0, the budget without decodes."""
        load = self._load()
        if tokens := self._step_policy.budget(load).prefill_tokens:
            return tokens
        nothing_else = load._replace(sampling_rows_in_flight=(), running_decodes=0, ready_decodes=0)
        return self._step_policy.budget(nothing_else).prefill_tokens

    def _fill_shared(self) -> StepBuilder:
        budget = self._step_policy.budget(self._load())
        if (last_slice := self._tables.stale_to) is not None:
            return self._fill_replay_or_whole(budget, last_slice)
        return self._fill_whole(budget)

    def _fill_whole(self, budget: StepBudget) -> StepBuilder:
        builder = self._new_builder()
        if self._may_decode():
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
        """Let the rows of the newest step in flight go on with the tokens that it samples: they wait for no plan.

        Not while prompts are computed, not for a step whose rows are more or fewer than an even share of all decodes,
        and not while drafts are found: then the rows of the next step are chosen once this one has retired. Not beside
        other micro-batches either, which keep the stages busy meanwhile: the work on the hosts would slow them.
        """
        if self._limits.micro_batches == 1 and not (
            self._prompts_go or self._ready or self._prompts.any_suspected or self._tables.stale_to is not None
        ):
            if (builder := self._next_window()) is not None:
                return builder
            ahead = sum([1 for record in self._in_flight if record.after is not None])
            if not self._may_extend(ahead):
                return None
            for record in self._in_flight:
                if not record.home or record.followed or record.isolated:
                    continue
                rows = [sequence for sequence in record.sampling if sequence.phase is _DECODE]
                going = [sequence for sequence in rows if sequence.scheduled + 1 < sequence.limit]
                smaller, rest = divmod(self._num_decodes - len(rows) + len(going), self._limits.micro_batches)
                if not smaller <= len(going) <= smaller + (rest > 0):
                    continue
                if self._drafting is not None and self._awaits_drafts(going, ahead):
                    continue
                if going and self._reserve_next(going):
                    return self._follow(record, going)
        self._extends = False
        return None

    def _next_window(self) -> StepBuilder | None:
        """Let the newest window in flight be followed by one that assumes its drafts, as far as drafts have come."""
        before = self._in_flight[-1] if self._in_flight else None
        if before is None or not before.lot or before.void or before.followed:
            return None
        sequence = before.decodes[0]
        own, known = sequence.drafts, len(sequence.tokens)
        if (flight := own.flight) is None or sequence.phase is not _DECODE:
            return None
        if sum([not each.void and each.decodes == before.decodes for each in self._in_flight]) >= flight.windows:
            return None
        start = known + own.chain.sent
        most = min(sequence.limit - 1, known + self._limits.slack_tokens - 1) - start
        drafts = own.chain.unsent(min(flight.lot, most))
        if not drafts.ids or not self._reach(sequence, start + len(drafts.ids)):
            return None
        before.followed = True
        own.chain.sent += len(drafts.ids)
        builder = StepBuilder(after=before.step, assumed=True, lot=flight.lot)
        builder.add_assumed(sequence, drafts, start=start, wanted=flight.drafts)
        return builder

    def _reach(self, sequence: Sequence, end: int) -> bool:
        """Give a sequence room for its tokens up to the place ``end``. Return False where no block is free."""
        while end > sequence.room:
            if not self._tables.grow_ahead(sequence, kept_blocks=0):
                return False
        return True

    def _may_extend(self, ahead: int) -> bool:
        """Return whether a step may be planned behind so many that are planned ahead.

        Once few are left, several are planned together: stages get them in one message.
        """
        if ahead <= (self._turns_ahead > _FEW_TURNS):
            self._extends = True
        elif ahead >= self._turns_ahead:
            self._extends = False
        return self._extends and ahead < self._turns_ahead

    @staticmethod
    def _awaits_drafts(sequences: Seq[Sequence], ahead: int) -> bool:
        """Return whether drafts have come for a sequence, or came of late: a window would wait for all planned steps.

        ``ahead``: steps that are planned ahead so far
        """
        if any(each.drafts.found for each in sequences):
            return True
        return ahead > 0 and any(each.drafts.without < _TURNS_WITHOUT_DRAFTS for each in sequences)

    def _reserve_next(self, sequences: Seq[Sequence]) -> bool:
        """Give each sequence room for one token behind those scheduled. Return False where no block is free."""
        full = [each for each in sequences if each.scheduled >= each.room]
        return all(self._tables.grow_ahead(each, kept_blocks=0) for each in full)

    def _follow(self, record: InFlight, sequences: Seq[Sequence]) -> StepBuilder:
        record.followed = True
        builder = StepBuilder(after=record.step, states=self._tables.states)
        share = self._share(len(sequences))
        for sequence in sequences:
            wanted = 0
            if self._drafting is not None and share is not None:
                wanted = self._drafting.wanted(sequence.drafts, share)
                share = share.with_window(0, wanted=wanted)
            builder.add_next(sequence, wanted=wanted)
        return builder

    def _new_builder(self, last_slice: int | None = None, *, isolated: bool = False) -> StepBuilder:
        return StepBuilder(last_slice=last_slice, isolated=isolated, states=self._tables.states)

    def _load(self) -> Load:
        running, ready = self._num_decodes, len(self._ready)
        if (beside := self._beside_chats) is not None:
            running = min(running, self._expected_chats + beside.rows * beside.in_flight)
            ready = min(ready, self._expected_chats + beside.rows)
        return Load(
            self._most_decode_steps(),
            tuple([0 if step.isolated else step.num_sampling for step in self._in_flight if step.after is None]),
            running,
            ready,
            self._unscheduled_prefill,
            self._tables.num_blocks,
            self._tables.free_blocks,
            self._limits.block_size,
            self._prompts.unscheduled_tokens if self._prompts else 0,
            None if self._chunk is None else self._chunk.step_tokens,
            self._most_prefill_tokens() if self._unscheduled_prefill else None,
        )

    def _most_prefill_tokens(self) -> int | None:
        """Return the bound on a step's prompt tokens, for the prompt that is furthest on; None if not known."""
        if self._pacer is None or self._step_policy.paced or not self._prompt_slot:
            return None
        return self._pacer.most_tokens(self._prompts.furthest_position, waiting=self._unscheduled_prefill)

    def _add_decodes(self, builder: StepBuilder, budget: int) -> None:
        deferred: list[Sequence] = []  # they wait for blocks of steps in flight
        held_back: list[Sequence] = []  # of batches, beside chats
        ready = self._ready
        share = self._share(min(budget, len(ready)))
        batch_rows = self._beside_chats.rows if self._beside_chats is not None else None
        while ready and budget > 0:
            sequence = ready.popleft()
            if batch_rows is not None and sequence.is_batch:
                if not batch_rows:
                    held_back.append(sequence)
                    continue
                batch_rows -= 1
            if len(sequence.tokens) <= sequence.room or self._grow(sequence, promised=len(deferred)):
                if share is None or self._drafting is None:
                    if sequence.drafts.found:
                        sequence.drafts.found, sequence.drafts.next = False, NO_DRAFTS
                    builder.add_decode(sequence)
                elif self._begin_flight(builder, sequence, share):
                    pass
                else:
                    drafts = self._window(sequence, share, promised=len(deferred))
                    wanted = self._drafting.wanted(sequence.drafts, share)
                    builder.add_decode(sequence, drafts, wanted=wanted)
                    share = share.with_window(len(drafts.ids), wanted=wanted)
                budget -= 1
            else:
                deferred.append(sequence)
                # A deferred sequence may be preempted meanwhile.
                deferred = [waiting for waiting in deferred if waiting.phase is Phase.DECODE]
        if deferred or held_back:
            for waiting in (*reversed(held_back), *reversed(deferred)):
                if waiting.phase is Phase.DECODE:
                    ready.appendleft(waiting)

    def _begin_flight(self, builder: StepBuilder, sequence: Sequence, share: Share) -> bool:
        """Begin a run of windows in flight with the sequence's newest token, if that pays. Return whether it does."""
        assert self._drafting is not None
        own, limits = sequence.drafts, self._limits
        able = sequence.may_fly and not sequence.alone
        able = able and windows_may_fly(recurrent=limits.states is not None, rest_tokens=limits.rest_tokens)
        alone = (
            limits.micro_batches == 1 and self._plans_ahead and not self._unscheduled_prefill and not builder.decodes
        )
        before, own.flight = own.flight, self._drafting.flight(own, share) if able and alone else None
        if own.flight is None:
            if before is not None:
                own.next, own.run_since_s, own.run_tokens = own.chain.take_rest(), None, 0
            return False
        if before is None:
            own.chain.begin(NO_DRAFTS)
        own.next, own.found = NO_DRAFTS, False
        known = len(sequence.tokens)
        most = min(own.flight.lot - 1, sequence.limit - known - 1, limits.slack_tokens - 1)
        drafts = own.chain.unsent(most)
        if drafts.ids and not self._reach(sequence, known + len(drafts.ids)):
            drafts = NO_DRAFTS
        own.chain.sent = len(drafts.ids)
        builder.lot = own.flight.lot
        builder.add_decode(sequence, drafts, wanted=own.flight.drafts)
        return True

    def _share(self, rows: int) -> Share | None:
        """Return what windows of a step with so many decodes share; None if none of them would pay."""
        if self._drafting is None:
            return None
        share = self._plain_share(rows)
        return share if self._drafting.may_pay(share) else None

    def _plain_share(self, rows: int) -> Share:
        return Share(rows=rows, alone=self._num_decodes <= 1)

    def _window(self, sequence: Sequence, share: Share, *, promised: int) -> Drafts:
        """Return the drafts that the sequence's next row verifies, as far as its limit, blocks and slots allow."""
        assert self._drafting is not None
        if not sequence.drafts.next.ids:
            sequence.drafts.found = False
            return NO_DRAFTS
        known, states = len(sequence.tokens), self._tables.states
        most = min(sequence.limit - known - 1, self._limits.slack_tokens - 1)
        if states is not None:
            most = min(most, states.most_window_tokens - 1)
        drafts = self._drafting.window(sequence.drafts, share, most=most)
        sequence.drafts.found = bool(drafts.ids)
        if known + len(drafts.ids) > sequence.room:
            self._tables.grow_ahead(sequence, kept_blocks=promised + len(self._running))
        room = max(0, sequence.room - known)
        return drafts if len(drafts.ids) <= room else Drafts(drafts.ids[:room], drafts.sources[:room])

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

    def _add_prefills(self, builder: StepBuilder, budget: int) -> None:
        if not self._unscheduled_prefill or not self._may_prefill(beside_decodes=bool(builder.decodes)):
            return
        self._fill_windows()
        if budget > 0 and len(self._waiting):
            self._admit_waiting()
        elif len(self._waiting) and (first := self._next_to_admit) is not None:
            self._preempt_for(first)
        most = self._most_chunk_tokens
        first_only = self._beside_chats is not None
        for sequence, num_tokens in self._prompts.share(budget, replays=builder.replays, first_only=first_only):
            if builder.may_begin(sequence):  # the oldest comes first and always fits
                self._add_chunk(builder, sequence, min(num_tokens, most))

    @property
    def _most_chunk_tokens(self) -> int:
        """Tokens of one sequence in a step, so that its chunks in all steps in flight fit into the windows' slack."""
        return max(1, self._limits.slack_tokens // self.prompt_steps)

    def _fill_windows(self) -> None:
        """Allocate blocks for prompts that have none for their next token."""
        for prompt in self._prompts if self._limits.windows else ():
            if not prompt.next_tokens:
                self._tables.fill_windows(prompt)

    def _add_chunk(self, builder: StepBuilder, sequence: Sequence, num_tokens: int) -> None:
        share = self._share(1) if num_tokens == sequence.unscheduled else None
        wanted = self._drafting.wanted(sequence.drafts, share) if self._drafting is not None and share else 0
        sequence.drafts.next = NO_DRAFTS
        builder.add_chunk(sequence, num_tokens, wanted=wanted)
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
            elif (ticket := self._tables.fetch(first, running=len(self._running))) is not None:
                self._waiting.park(ticket)
            elif not self._admit(first) and not (self._tables.lacked_room and self._preempt_for(first)):
                self._head_does_not_fit = True
                return

    @property
    def _next_to_admit(self) -> Sequence | None:
        """The first in the queue, if it would be computed soon once its blocks are allocated."""
        first = self._waiting.first()
        if first is None or not self._prompts.accepts(first):
            return None
        if self._turn is Turn.PROMPTS and (phases := self._phases) is not None and not phases.admits(first):
            return None
        return first

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
        if self._turn is Turn.PROMPTS and (phases := self._phases) is not None:
            phases.note_admitted(sequence)
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
            is_batch=spec.priority == Priority.BATCH,
            reuse_prefix=spec.reuse_prefix,
            alone=spec.alone,
            may_fly=spec.may_fly,
            registration_base_bytes=spec.registration_base_bytes,
            registration_token_bytes=spec.registration_token_bytes,
            rest_tokens=self._limits.rest_tokens,
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

    def _append(self, sequence: Sequence, token_ids: Seq[int], events: list[Event]) -> None:
        """Append a row's sampled tokens up to the sequence's end. Its step has computed all but the last of them."""
        if sequence.phase is Phase.ENDED:
            return  # cancelled meanwhile: drop the tokens
        tokens, reason = sequence.tokens, None
        before = count = len(tokens)
        for token_id in token_ids:
            events.append(TokenSampled(sequence.sequence, count - sequence.prompt_tokens, token_id))
            tokens.append(token_id)
            count += 1
            if token_id in sequence.stop_ids:
                reason = EndReason.STOP
                break
            if count >= sequence.limit:
                reason = sequence.limit_reason
                break
        if count > before + 1 and count > sequence.next_full:
            self._tables.note_computed(sequence, count - 1)
        if sequence.phase is _DECODE:
            if reason is None and sequence.scheduled < count:
                self._ready.append(sequence)  # no step that was planned ahead holds the newest token
        elif sequence.phase is Phase.WAITING:
            # Preempted meanwhile: the tokens count and are computed again with the rest.
            self._unscheduled_prefill += count - before
        if reason is not None:
            self._end(sequence, reason, events)

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
        sequence.scheduled, sequence.drafts.next, sequence.drafts.flight = 0, NO_DRAFTS, None
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
        self._num_chats -= not sequence.is_batch
        if not sequence.is_batch and self._now_s is not None:
            self._chats_until_s = self._now_s + _CHATS_RETURN_S
        if sequence.is_batch and reason is not EndReason.CANCELLED:
            self.answer_lengths.note(Lengths(sequence.prompt_tokens, sequence.num_output))
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
