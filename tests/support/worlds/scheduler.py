"""A pipeline reduced to what the scheduler can get wrong: block tables from deltas, KV slots, an oracle for tokens."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate
from typing import Any

from edgepipe.backend.drafting import Drafts, DraftSource
from edgepipe.backend.step_layout import check_states
from edgepipe.backend.types import BlockRun, StepRow, TierMove, WindowRuns
from edgepipe.ids import EngineId, Epoch, SequenceId, StepId
from edgepipe.scheduler import (
    DiskWork,
    EndReason,
    Event,
    HeldTiers,
    PlaceKey,
    Policy,
    ScheduledStep,
    Scheduler,
    SchedulerLimits,
    SequenceEnded,
    SequenceSpec,
    StageHolds,
    Takeover,
    ThrottledPolicy,
    TokenSampled,
    takeover,
)
from edgepipe.scheduler.drafting import Drafting
from edgepipe.scheduler.kv import next_key
from edgepipe.spec.memory_classes import StateSlots, WindowPool
from edgepipe.stage.held_keys import BegunMove, HeldKeys
from edgepipe.stage.step_order import StepUses
from edgepipe.wire.tiers import keys_of

VOCAB = 97
NUM_SLICES = 3
_UNKNOWN = (-1, -1)


def fold(value: int, token: int) -> int:
    """What a token's KV holds, given that of the token before it."""
    return (value * 31 + token + 1) % 1_000_003


def next_token(tokens: Sequence[int]) -> int:
    """The oracle: depends on every token and on their order."""
    value = 7
    for token in tokens:
        value = fold(value, token)
    return value % VOCAB


def reference(spec: SequenceSpec, *, context: int) -> list[int]:
    """All output tokens that the sequence shall have, those generated before included."""
    output = list(spec.generated)
    limit = context - len(spec.prompt) if spec.max_tokens is None else spec.max_tokens
    while len(output) < limit and len(spec.prompt) + len(output) < context:
        if output and output[-1] in spec.stop_ids:
            break
        output.append(next_token([*spec.prompt, *output]))
    return output


@dataclass
class Order:
    """A message of the engine to all slices: a step's plan, or only keys."""

    keys: Sequence[PlaceKey]
    step: ScheduledStep | None = None
    left: list[list[list[BlockRun]]] = field(default_factory=list)  # tables of each sequence that has left
    # By memory class: blocks that were appended to a table, and how many of them are shared ones.
    appended: list[tuple[int, BlockRun, int]] = field(default_factory=list)


@dataclass
class Memory:
    """What a slice keeps."""

    held: HeldKeys  # what a stage tells another engine
    # block * block_size + offset -> token, and all up to it folded
    slots: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    # slot -> tokens before the state, and these folded
    states: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    # by windowed class: block * block_size + offset -> position and token
    windows: defaultdict[int, dict[int, tuple[int, int]]] = field(default_factory=lambda: defaultdict(dict))
    # By memory class and place in host memory: what a block or a slot held.
    host: defaultdict[int, dict[int, list[tuple[int, int]]]] = field(default_factory=lambda: defaultdict(dict))
    disk: defaultdict[int, dict[int, list[tuple[int, int]]]] = field(default_factory=lambda: defaultdict(dict))
    orders: deque[Order] = field(default_factory=deque[Order])  # that it has not got
    begun: dict[int, Sequence[BegunMove]] = field(default_factory=dict[int, Sequence[BegunMove]])  # by step in flight
    moves_behind: list[BegunMove] = field(default_factory=list[BegunMove])  # of steps that ended before this slice

    def move_all(self, *, limits: SchedulerLimits) -> None:
        """Perform the moves of the next step on this slice, and of those that ended before it."""
        self.move([each.move for each in self.moves_behind], limits=limits)
        self.held.end(self.moves_behind)
        self.moves_behind.clear()

    def holds(self, limits: SchedulerLimits) -> HeldTiers:
        """Return what the stage tells another engine."""
        counts = (limits.device_places, limits.host_places, limits.disk_places)
        device, host, disk = tiers = [[dict[bytes, int]() for _ in each] for each in counts]
        for page in self.held.pages(Epoch(1, EngineId("next"))):
            tiers[page.tier][page.memory_class].update(zip(keys_of(page.keys), page.places, strict=True))
        return HeldTiers(device=tuple(device), host=tuple(host), disk=tuple(disk))

    def obey(self, *, up_to: int | None = None) -> None:
        """Get the orders up to a step's; None: all. What they say is written may be so from then on."""
        while self.orders and (up_to is None or up_to not in self.begun):
            order = self.orders.popleft()
            self.held.name(order.keys)
            for tables in order.left:
                self.held.release(tables)
            if (step := order.step) is not None:
                self.begun[step.step] = self.held.begin(step.moves)
            for number, run, shared in order.appended:
                self.held.append(number, run, shared=shared)
            if step is not None:
                for copy in step.copies:
                    self.held.append(0, BlockRun(copy.target, 1))
                for state in step.states:
                    self.held.write_states(state)

    def move(self, moves: Sequence[TierMove], *, limits: SchedulerLimits) -> None:
        """Perform moves to host memory and back, in order."""
        for move in moves:
            assert 0 <= move.kept < limits.host_places[move.number]
            size, values = limits.block_size, self.slots
            if move.number > len(limits.windows):
                size, values = 1, self.states
            elif move.number:
                values = self.windows[move.number - 1]
            places = range(move.place * size, (move.place + 1) * size)
            if move.out:
                self.host[move.number][move.kept] = [values.get(place, _UNKNOWN) for place in places]
            else:  # a stage that lost its host memory brings anything back
                lost: list[tuple[int, int]] = [_UNKNOWN] * size
                values.update(zip(places, self.host[move.number].get(move.kept, lost), strict=True))

    def perform(self, work: DiskWork, *, limits: SchedulerLimits) -> None:
        """Copy blocks and states from host memory to disk, or back."""
        for move in work.moves:
            assert 0 <= move.place < limits.host_places[move.number]
            assert 0 <= move.kept < limits.disk_places[move.number]
            host, disk = self.host[move.number], self.disk[move.number]
            lost: list[tuple[int, int]] = [_UNKNOWN] * (limits.block_size if move.number <= len(limits.windows) else 1)
            if move.out:
                copied = self.held.begin_write(move.number, move.place, move.kept)
                disk[move.kept] = host.get(move.place, lost)
                self.held.end_write(move.number, move.place, move.kept, copied)
            else:  # a stage that lost its disk brings anything back
                host[move.place] = disk.get(move.kept, lost)
                self.held.copied_back(move.number, move.place, move.kept)

    def tear(self, work: DiskWork) -> None:
        """Make unknown what a work writes that was broken off."""
        for move in work.moves:
            (self.disk if move.out else self.host)[move.number].pop(move.kept if move.out else move.place, None)
            if move.out:
                self.held.begin_write(move.number, move.place, move.kept)
            else:
                self.held.give_back(move.number, [move.place])

    def spoil(self, moves: Sequence[TierMove], *, limits: SchedulerLimits) -> None:
        """Make unknown what moves write."""
        for move in moves:
            self.host[move.number].pop(move.kept, None) if move.out else self.move([move], limits=limits)


@dataclass
class World:
    """Drives a scheduler and computes its steps the way stages would: in order, from tables and slots."""

    limits: SchedulerLimits
    policy: Policy = field(default_factory=ThrottledPolicy)
    acceptance: float | None = None  # probability that a draft is right; None: nothing is drafted
    disk_s: float = 0.0  # time of a copy between host memory and disk
    damage: float = 0.0  # probability that a stage cannot read a copy on disk
    breakage: float = 0.0  # probability that a stage has a problem with its disk after a work
    step_s: float = 0.0  # time between two steps that retire; 0: turns are not measured
    flies: bool = False  # windows of drafts may follow one another in flight

    def __post_init__(self) -> None:
        self.random = random.Random(0)
        self.now_s = 0.0
        self.windows_seen: Counter[tuple[int, int]] = Counter()  # rows by their drafts, and by how many were right
        self._turns_ahead = 0  # steps planned ahead at most
        self.scheduler = self._new_scheduler()
        self.specs: dict[SequenceId, SequenceSpec] = {}
        self.output: dict[SequenceId, list[int]] = {}
        self.ended: dict[SequenceId, SequenceEnded] = {}
        self.in_flight: deque[ScheduledStep] = deque()
        self.works: list[tuple[DiskWork, set[int]]] = []  # under way, in order, each with the slices that performed it
        self.now_s = 0.0
        self.given_back = 0  # places in host memory
        self.lost_copies = 0  # copies that could not be read
        self.tables: dict[SequenceId, list[int]] = {}  # what a stage knows
        # By windowed class: what a stage knows, by sequence and place.
        self.windows: list[dict[SequenceId, dict[int, int]]] = [{} for _ in self.limits.windows]
        self.slices = [self._new_memory() for _ in range(NUM_SLICES)]
        self.computed: Counter[int] = Counter()  # tokens, by slice, in this epoch
        self.steps: list[ScheduledStep] = []
        self.suspected: set[SequenceId] = set()  # until a step of its own has sampled a token

    def plan_ahead(self, turns: int = 1) -> None:
        """Let this epoch's scheduler and all later ones plan so many steps ahead."""
        self._turns_ahead = turns
        self.scheduler.plan_ahead()
        self.scheduler.set_turns_ahead(turns)

    def _new_memory(self) -> Memory:
        return Memory(HeldKeys(self.limits.device_places))

    def _new_scheduler(self) -> Scheduler:
        scheduler = Scheduler(self.limits, self.policy)
        if self.acceptance is not None:  # rows cost nothing, so all drafts are tried
            scheduler.set_drafting(self._drafting())
        if self._turns_ahead:
            scheduler.plan_ahead()
            scheduler.set_turns_ahead(self._turns_ahead)
        return scheduler

    def _drafting(self) -> Drafting:
        if not self.flies:
            return Drafting(lambda rows: 1.0, lambda: 0.0)
        return Drafting(lambda rows: 1.0 + 0.4 * rows, lambda: 0.0, lambda rows: 0.3)

    def submit(self, *specs: SequenceSpec) -> None:
        if self.flies:
            specs = tuple([replace(spec, may_fly=True) for spec in specs])
        events = self.scheduler.submit(specs)
        for spec in specs:
            self.specs[spec.sequence] = spec
            self.output[spec.sequence] = list(spec.generated)
        self.suspected |= {spec.sequence for spec in specs if spec.alone}
        self.note(events)

    def next_epoch(self, *, lost: Collection[int] = ()) -> None:
        """All steps in flight are lost; what has retired is still there, but on the slices ``lost``."""
        pool = self.scheduler.hand_over()
        self.scheduler = self._new_scheduler()
        for step in self.in_flight:  # some stages may have computed them
            self._damage(step)
        for memory in self.slices:
            memory.obey()
            for work, _ in self.works:
                memory.tear(work)
        for index in lost:
            self.slices[index] = self._new_memory()
        if lost and max(lost) == NUM_SLICES - 1:
            self.slices = [self._new_memory() for _ in self.slices]
        else:
            if lost:
                pool.lose(max(lost))
            self.scheduler.take_over(pool)
        self._begin_epoch()

    def next_engine(self, *, lost: Collection[int] = ()) -> Takeover | None:
        """The engine's process ends, and its tables with it. The next one begins with what the slices still hold.

        lost  slices whose processes ended, too

        Returns what the next engine took over.
        """
        done = len(self.in_flight)
        for index, memory in enumerate(self.slices):
            done = self.random.randint(0, done)  # earlier slices may have computed more
            if known := self.random.randint(done, len(self.in_flight)):
                memory.obey(up_to=self.in_flight[known - 1].step)
            elif not self.in_flight and self.random.random() < 0.8:
                memory.obey()
            for place, step in enumerate(list(self.in_flight)[:known]):
                begun = memory.begun[step.step]
                if place >= done:
                    memory.spoil([each.move for each in begun if each.move.out], limits=self.limits)
                else:
                    memory.moves_behind += begun
                    if step.last_slice is None or step.last_slice >= index:
                        memory.move_all(limits=self.limits)
                if step.last_slice is None or step.last_slice >= index:
                    self._spoil_rows(step, memory)
            memory.orders.clear()
            for sequence in self.tables:
                memory.held.release(self._runs(sequence))
            for work, ready in self.works:
                if index not in ready and (becomes := self.random.randrange(3)):
                    memory.tear(work) if becomes == 1 else memory.perform(work, limits=self.limits)
        for index in lost:
            self.slices[index] = self._new_memory()
        self._check_reports()
        self.scheduler = self._new_scheduler()
        found = takeover([StageHolds(index, memory.holds(self.limits)) for index, memory in enumerate(self.slices)])
        if found is not None:
            self.scheduler.adopt(found)
        self._begin_epoch()
        return found

    def _begin_epoch(self) -> None:
        """Send what is not done to the new scheduler."""
        for memory in self.slices:
            memory.moves_behind.clear()
            memory.begun.clear()
            memory.held.begin_epoch()
        self.works.clear()
        self.in_flight.clear()
        self.tables, self.steps = {}, []
        self.computed.clear()
        self._reads.clear()
        self._snapshot.clear()
        self._sampled.clear()
        self._surplus.clear()
        self._chains.clear()
        self._lots.clear()
        self._window_snapshot.clear()
        self.windows = [{} for _ in self.limits.windows]
        self._due.clear()
        self.suspected = {sequence for sequence, spec in self.specs.items() if spec.alone}
        going_on = [
            replace(spec, generated=tuple(self.output[sequence]))
            for sequence, spec in self.specs.items()
            if sequence not in self.ended
        ]
        self.note(self.scheduler.submit(going_on, accepted=True))

    def cancel(self, sequence: int, *, at_position: int = 0) -> None:
        self.note(self.scheduler.cancel(SequenceId(sequence), at_position=at_position))

    def fill(self) -> int:
        """Send steps until the scheduler has none."""
        count = 0
        while self._lots and self.random.random() < 0.8:
            sequence, drafts, position, newest = self._lots.popleft()
            self.scheduler.add_drafts(sequence, drafts, position=position, step=newest)
        while (step := self.scheduler.next_step()) is not None:
            order = Order(step.keys, step)
            self._check_new(step, order)
            self._send(order)
            self.in_flight.append(step)
            self.steps.append(step)
            self._check_turns(step)
            count += 1
        if keys := self.scheduler.take_keys():
            self._send(Order(keys))
        while (back := self.scheduler.next_given_back()) is not None:
            assert 0 < len(back.places) <= 32
            self.given_back += len(back.places)
            for memory in self.slices:
                memory.obey()
                for place in back.places:
                    memory.host[back.number].pop(place, None)
                memory.held.give_back(back.number, back.places)
        self._check_bound()
        while (work := self.scheduler.next_disk_work(now_s=self.now_s)) is not None:
            assert len(self.works) < 4, "stages queue no more"
            self.works.append((work, set()))
        return count

    def _runs(self, sequence: SequenceId) -> list[list[BlockRun]]:
        """Return a sequence's tables, by memory class."""
        tables = [self.tables[sequence], *[[*table[sequence].values()] for table in self.windows]]
        return [[BlockRun(block, 1) for block in table] for table in tables]

    def _send(self, order: Order) -> None:
        for memory in self.slices:
            memory.orders.append(order)

    def _check_bound(self) -> None:
        """Each place in host memory is in use, free or given back. With nothing in flight, the bound holds."""
        for host in self.scheduler._tables._hosts:  # pyright: ignore[reportPrivateUsage]
            used, coming = {*host._places.values()}, {*host._reading.values()}  # pyright: ignore[reportPrivateUsage]
            places = [*used, *coming, *host._free, *host._given_back]  # pyright: ignore[reportPrivateUsage]
            assert sorted(places) == list(range(host.num_places)), "a place is lost, or there twice"
            if not self.in_flight and not self.works and not self.scheduler._moves_in_flight():  # pyright: ignore[reportPrivateUsage]
                waiting = {move.kept for move in self.scheduler._tables.waiting_moves if move.number == host.number}  # pyright: ignore[reportPrivateUsage]
                assert host.num_over <= len(waiting), "more host memory is used than allowed"

    def bound_host(self, permille: int) -> None:
        """Other programs take memory, or give it back."""
        self.scheduler.bound_host(permille)

    def _followed(self, step: ScheduledStep) -> Iterator[int]:
        """The steps in flight that the step follows, one by one back to the one that is computed."""
        numbers = {sent.step: sent for sent in self.in_flight}
        while step.after is not None and (before := numbers.get(step.after)) is not None:
            yield before.step
            step = before

    def use_disk(self) -> None:
        """Let one slice perform its next work. The work is done once all of them have."""
        index = self.random.randrange(NUM_SLICES)
        mine = next(((work, ready) for work, ready in self.works if index not in ready), None)
        if mine is None:
            return
        work, ready = mine
        self.slices[index].obey()
        self.slices[index].perform(work, limits=self.limits)
        ready.add(index)
        while self.works and len(self.works[0][1]) == NUM_SLICES:
            done, _ = self.works.pop(0)
            reads = [place for place, move in enumerate(done.moves) if not move.out]
            failed = {place for place in reads if self.random.random() < self.damage}
            self.slices[0].obey()
            for number, place, kept, *_ in [done.moves[index] for index in failed]:
                self.slices[0].host[number].pop(place, None)
                self.slices[0].held.give_back(number, [place])
                self.slices[0].held.lose(number, kept)
            self.lost_copies += len(failed)
            problem = "the disk is full" if self.random.random() < self.breakage else ""
            if problem:
                failed = set(range(len(done.moves)))
            seconds = self.disk_s * len(done.moves)
            self.scheduler.disk_done(done.number, failed=failed, seconds=seconds, problem=problem, now_s=self.now_s)

    def retire(self, place: int = 0) -> None:
        """Compute and retire a step in flight: the oldest, or one that ``passing`` found."""
        step = self.in_flight[place]
        del self.in_flight[place]
        for memory in self.slices:
            memory.obey(up_to=step.step)
        if step.after is not None:
            step = step._replace(token_ids=tuple([self._sampled[step.after][each] for each in step.sequences]))
        ids = self._compute(step)
        self.void += [] in ids
        sampling = [each for each, samples in zip(step.sequences, step.samples, strict=True) if samples]
        self._sampled[step.step] = {each: row[-1] for each, row in zip(sampling, ids, strict=True) if row}
        for sequence, row in zip(sampling, ids, strict=True):
            if sequence in self.ended:  # it ended before, and the step had been planned ahead
                self._surplus[sequence] += row
        self.now_s += self.step_s
        now_s = self.now_s if self.step_s else None
        self.note(self.scheduler.retire(step.step, ids, self._draft(step, ids), now_s=now_s))
        self._draft_ahead(step, ids)

    def _draft_ahead(self, step: ScheduledStep, ids: list[list[int]]) -> None:
        """Make lots of drafts behind those that were made before, as a drafter does that knows the step's tokens."""
        if not step.lot:
            for sequence in step.sequences:
                self._chains.pop(sequence, None)
            return
        (sequence,), (tokens,) = step.sequences, ids
        if not tokens or sequence in self.ended:
            return
        chain = self._chains.get(sequence, [])
        self._chains[sequence] = chain = chain[len(tokens) :] if chain[: len(tokens)] == tokens else []
        while len(chain) + step.lot <= step.drafts[0] and self.random.random() < 0.8:
            known, own = [*self.specs[sequence].prompt, *self.output[sequence]], list[int]()
            for _ in range(step.lot):
                right = self.random.random() < (self.acceptance or 0)
                own.append(next_token([*known, *chain, *own]) if right else self.random.randrange(VOCAB))
            drafts = Drafts(tuple(own), (DraftSource.MODEL,) * len(own))
            self._lots.append((sequence, drafts, len(known) + len(chain), step.step))
            chain += own

    def _draft(self, step: ScheduledStep, ids: list[list[int]]) -> list[Drafts]:
        """Drafts of each sampling row: the oracle's tokens, up to the first wrong one."""
        if self.acceptance is None or not step.drafts or step.lot:
            return []
        found: list[Drafts] = []
        rows = iter(ids)
        for sequence, wanted, samples in zip(step.sequences, step.drafts, step.samples, strict=True):
            if not samples:
                continue
            tokens, own = [*self.specs[sequence].prompt, *self.output[sequence], *next(rows)], list[int]()
            for _ in range(self.random.randint(0, wanted)):
                right = self.random.random() < self.acceptance
                own.append(next_token([*tokens, *own]) if right else self.random.randrange(VOCAB))
            found.append(Drafts(tuple(own), (DraftSource.MODEL,) * len(own)))
        return found

    def passing(self) -> int | None:
        """Return the place of the first step in flight that stages compute before older ones; None without one."""
        uses = [self._uses(step) for step in self.in_flight]
        for place, step in enumerate(self.in_flight):
            older = [*zip(self.in_flight, uses, strict=True)][:place]
            if older and all(step.may_retire_before(each) and uses[place].may_pass(used) for each, used in older):
                return place
        return None

    def _uses(self, step: ScheduledStep) -> StepUses:
        def runs(blocks: Iterable[int]) -> tuple[BlockRun, ...]:
            return tuple(BlockRun(block, 1) for block in blocks)

        states = step.states or [None] * step.num_rows
        columns = zip(step.sequences, step.positions, step.num_tokens, states, strict=True)
        rows = [
            StepRow(
                sequence=sequence,
                position=position,
                num_tokens=num_tokens,
                runs=runs(self._snapshot[step.step][sequence]),
                windows=tuple(
                    WindowRuns(min(tables[sequence]), runs(tables[sequence].values()))
                    for tables in self._window_snapshot[step.step]
                ),
                state=state,
            )
            for sequence, position, num_tokens, state in columns
        ]
        return StepUses(rows, step.copies, step.moves, block_size=self.limits.block_size, windows=self.limits.windows)

    def go(self, steps: int) -> None:
        """Retire so many steps; each time send all that the scheduler has."""
        for _ in range(steps):
            self.fill()
            self.retire()

    def run(self, *, max_turns: int = 100_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_turns):
            self.fill()
            if not self.in_flight and not self.works:
                return
            if self.works and (not self.in_flight or self.random.random() < 0.5):
                self.use_disk()
            else:
                self.retire()
        raise AssertionError("the work does not end")

    def note(self, events: Sequence[Event]) -> None:
        for event in events:
            assert event.sequence not in self.ended, "something follows the ending"
            if isinstance(event, TokenSampled):
                assert event.position == len(self.output[event.sequence])
                self.output[event.sequence].append(event.token_id)
                self.suspected.discard(event.sequence)
            else:
                assert event.num_tokens == len(self.output[event.sequence])
                self.ended[event.sequence] = event

    def check_outputs(self) -> None:
        """Exactly the oracle's tokens for who ran to the end, a prefix of them for who was cancelled."""
        context = self.limits.max_tokens
        for sequence, spec in self.specs.items():
            wanted, got = reference(spec, context=context), self.output[sequence]
            reason = self.ended[sequence].reason
            if reason is EndReason.CANCELLED:
                assert got == wanted[: len(got)]
            else:
                assert got == wanted
                assert reason is (EndReason.STOP if got[-1] in spec.stop_ids else EndReason.LENGTH)

    def assert_invariants(self) -> None:
        """Nothing in flight, nothing queued, every block free."""
        stats = self.scheduler.stats()
        assert (stats.in_flight, stats.running, stats.waiting) == (0, 0, 0)
        assert stats.free_blocks == stats.num_blocks
        assert set(self.ended) == set(self.specs)
        assert self.scheduler._tables.draining_blocks == 0  # pyright: ignore[reportPrivateUsage]
        for each in self.scheduler._tables._windows:  # pyright: ignore[reportPrivateUsage]
            assert (each.kv.free_blocks, each.draining_blocks) == (each.kv.num_blocks, 0)
        if (states := self.scheduler._tables.states) is not None:  # pyright: ignore[reportPrivateUsage]
            assert states.free_slots == states.num_slots
        assert not self.scheduler._tables._kv._coming, "somebody would be waited for in vain"  # pyright: ignore[reportPrivateUsage]
        assert self.scheduler._pool.unscheduled_prefill == 0  # pyright: ignore[reportPrivateUsage]
        assert self.scheduler._pool.num_decodes == 0  # pyright: ignore[reportPrivateUsage]

    def _check_new(self, step: ScheduledStep, order: Order) -> None:
        """No block is written while somebody else's table or step in flight holds it. Tables advance as at a stage."""
        size = self.limits.block_size
        for sequence in step.frees:
            order.left.append(self._runs(sequence))
            del self.tables[sequence]
        for sequence in step.registers:
            assert sequence not in self.tables
            self.tables[sequence] = []
        new: set[int] = set()
        for row, start, count in zip(step.block_rows, step.block_starts, step.block_counts, strict=True):
            assert 0 <= start < start + count <= self.limits.num_blocks
            shared = step.positions[row] // size - len(self.tables[step.sequences[row]])
            order.appended.append((0, BlockRun(start, count), min(max(0, shared), count)))
            self.tables[step.sequences[row]] += range(start, start + count)
            new |= set(range(start, start + count))
        assert {copy.target for copy in step.copies} <= new, "a copy goes into a table that has been told"
        in_flight = set().union(*self._reads.values()) | {
            copy.source for sent in self.in_flight for copy in sent.copies
        }
        sources = {copy.source for copy in step.copies}
        written = {copy.target for copy in step.copies}
        assert not written & sources, "a copy reads what its step writes"
        written |= {move.place for move in step.moves if not move.out and not move.number}
        assert not written & in_flight, "a copy goes over a block in use"
        for sequence, position in zip(step.sequences, step.positions, strict=True):
            others = {block for other, table in self.tables.items() if other != sequence for block in table}
            begun = {block for sent in self.in_flight if sequence in sent.sequences for block in self.tables[sequence]}
            mine = set(self.tables[sequence][position // size :])
            assert not mine & others, "a block is written that somebody else holds"
            assert not (mine - begun) & in_flight, "a block is written that a step in flight uses"
            assert not mine & sources, "a copy reads what its step writes"
        assert len(set(step.sequences)) == step.num_rows
        before_it = {*self._followed(step)}
        sampling = {
            s
            for sent in self.in_flight
            if sent.step not in before_it and not sent.lot
            for s, samples in zip(sent.sequences, sent.samples, strict=True)
            if samples
        }
        if step.after is not None:
            (before,) = [sent for sent in self.in_flight if sent.step == step.after]
            ends = zip(before.sequences, before.positions, before.num_tokens, before.samples, strict=True)
            after = {sequence: position + count for sequence, position, count, samples in ends if samples}
            assert [after[sequence] for sequence in step.sequences] == [*step.positions]
            assert not [sent for sent in self.in_flight if sent.after == step.after], "two steps follow one"
        assert not sampling & set(step.sequences), "a sequence has two steps while one samples"
        flying = [sent for sent in self.in_flight if sent.lot and sent.sequences == step.sequences]
        if step.assumed:
            assert [sent.positions[0] + sent.num_tokens[0] for sent in flying[-1:]] == [*step.positions]
        else:
            assert all(sent.assumed for sent in flying), "a sequence goes on behind a window that may be right"
        self.most_flying = max(self.most_flying, len(flying))
        self._check_windows(step, order)
        self._check_states(step)
        self._reads[step.step] = {block for sequence in step.sequences for block in self.tables[sequence]}
        self._snapshot[step.step] = {sequence: list(self.tables[sequence]) for sequence in step.sequences}

    def _check_windows(self, step: ScheduledStep, order: Order) -> None:
        """A window's blocks follow one another, and no sequence holds more than the window and the slack."""
        for tables in self.windows:
            for sequence in step.frees:
                del tables[sequence]
            tables.update({sequence: {} for sequence in step.registers})
        for number, (tables, pool, new) in enumerate(
            zip(self.windows, self.limits.windows, step.windows, strict=False), start=1
        ):
            for row, place, start, count in zip(*new, strict=True):
                shared = step.positions[row] // self.limits.block_size - place
                order.appended.append((number, BlockRun(start, count), min(max(0, shared), count)))
                table = tables[step.sequences[row]]
                assert 0 <= start < start + count <= pool.num_blocks
                assert not table or place == max(table) + 1
                table.update({place + index: start + index for index in range(count)})
        for sequence, position, num_tokens in zip(step.sequences, step.positions, step.num_tokens, strict=True):
            for tables, pool in zip(self.windows, self.limits.windows, strict=True):
                assert max(tables[sequence]) >= (position + num_tokens - 1) // pool.block_size
        for each, pool in zip(self.scheduler._tables._windows, self.limits.windows, strict=True):  # pyright: ignore[reportPrivateUsage]
            number = self.scheduler._tables._windows.index(each)  # pyright: ignore[reportPrivateUsage]
            for running in self.scheduler._running.values():  # pyright: ignore[reportPrivateUsage]
                assert len(running.windows[number].blocks) <= pool.most_blocks + pool.more // pool.block_size
        self._window_snapshot[step.step] = [
            {sequence: dict(tables[sequence]) for sequence in step.sequences} for tables in self.windows
        ]

    def _check_states(self, step: ScheduledStep) -> None:
        """The rows name slots as backends require it."""
        pool = self.limits.states
        assert len(step.states) == (step.num_rows if pool is not None else 0)
        if pool is not None:
            columns = zip(step.sequences, step.positions, step.num_tokens, step.states, strict=True)
            rows = [
                StepRow(sequence=sequence, position=position, num_tokens=count, runs=(), state=state)
                for sequence, position, count, state in columns
            ]
            check_states(rows, pool.num_slots)

    def _damage(self, step: ScheduledStep) -> None:
        """Make unknown what a step writes."""
        for memory in self.slices:
            memory.spoil(step.moves, limits=self.limits)
        for memory in self._memories(step):
            self._spoil_rows(step, memory)

    def _spoil_rows(self, step: ScheduledStep, memory: Memory) -> None:
        """Make unknown what a step's copies and rows write on one slice."""
        size, tables = self.limits.block_size, self._snapshot[step.step]
        blocks = [copy.target for copy in step.copies]
        slots = {block * size + offset for block in blocks for offset in range(size)}
        for sequence, position, count in zip(step.sequences, step.positions, step.num_tokens, strict=True):
            slots |= {tables[sequence][p // size] * size + p % size for p in range(position, position + count)}
        for number, tables in enumerate(self._window_snapshot[step.step]):
            for sequence, position, count in zip(step.sequences, step.positions, step.num_tokens, strict=True):
                places = [tables[sequence][p // size] * size + p % size for p in range(position, position + count)]
                memory.windows[number].update(dict.fromkeys(places, _UNKNOWN))
        memory.slots.update(dict.fromkeys(slots, _UNKNOWN))
        memory.states.update({write.slot: _UNKNOWN for state in step.states for write in state.writes})

    def _check_reports(self) -> None:
        """Every key that a slice tells is that of what the place holds there: tokens, a window's, or a state."""
        size, expected = self.limits.block_size, dict[bytes, tuple[int, list[int], list[int]]]()
        for sequence, own in self.specs.items():
            tokens, before = [*own.prompt, *self.output[sequence]], b""
            folded = [*accumulate(tokens, fold, initial=7)]
            for start in range(0, len(tokens) - size + 1, size):
                before = next_key(before, tokens[start : start + size])
                expected[before] = (start, tokens[start : start + size], folded[start + 1 : start + size + 1])
        for memory in self.slices:
            for number, held in enumerate(memory.holds(self.limits).device):
                for key, place in held.items():
                    start, tokens, folded = expected[key]
                    if number > len(self.limits.windows):
                        assert memory.states[place] == (start + size, folded[-1])
                        continue
                    slots = memory.windows[number - 1] if number else memory.slots
                    right = (
                        zip(range(start, start + size), tokens, strict=True)
                        if number
                        else zip(tokens, folded, strict=True)
                    )
                    assert [slots.get(place * size + offset) for offset in range(size)] == [*right]

    def _memories(self, step: ScheduledStep) -> list[Memory]:
        """Return those of the slices that compute a step."""
        return self.slices[: None if step.last_slice is None else step.last_slice + 1]

    def _write_states(self, step: ScheduledStep, states: dict[int, tuple[int, int]]) -> None:
        """Write the states that the step keeps. Each row must find the state of exactly the tokens before it."""
        kept: dict[int, tuple[int, int]] = {}
        for sequence, position, state in zip(step.sequences, step.positions, step.states, strict=False):
            known = self._tokens(step, sequence)
            before = (0, 7) if state.read is None else states[state.read]
            assert before == (position, reduce(fold, known[:position], 7)), "a row reads another state"
            for write in state.writes:
                end = position + write.after
                kept[write.slot] = (end, reduce(fold, known[position:end], before[1]))
        states.update(kept)

    def _write_windows(
        self,
        step: ScheduledStep,
        snapshots: list[dict[SequenceId, dict[int, int]]],
        windows: defaultdict[int, dict[int, tuple[int, int]]],
    ) -> None:
        """Write the step's tokens to every window. All tokens that they see must be there, after those of the step."""
        held = [(row, *at) for row, at in enumerate(zip(step.sequences, step.positions, step.num_tokens, strict=True))]
        for number, snapshot in enumerate(snapshots):
            pool, slots, size = self.limits.windows[number], windows[number], self.limits.block_size
            for row, sequence, position, num_tokens in held:
                known, table = self._tokens(step, sequence), snapshot[sequence]
                assert step.positions[row] == position
                for p in range(position, position + num_tokens):
                    slots[table[p // size] * size + p % size] = (p, known[p])
            for _, sequence, position, num_tokens in held:
                known, table = self._tokens(step, sequence), snapshot[sequence]
                for p in range(max(0, position - pool.window + 1), position + num_tokens):
                    held_there = slots.get(table[p // size] * size + p % size)
                    assert held_there == (p, known[p]), "a window lacks what a token sees"

    def _check_turns(self, step: ScheduledStep) -> None:
        """A suspected sequence shares no step. Of k of them each that has blocks has one of the next 2k steps."""
        assert step.num_rows == 1 or not self.suspected & set(step.sequences), "a step holds a suspected sequence"
        suspected = self.scheduler._prompts._suspected  # pyright: ignore[reportPrivateUsage]
        waiting = [suspect for suspect in suspected if suspect.next_tokens > 0 or suspect.sequence in step.sequences]
        latest = len(self.steps) + 2 * len(suspected)
        turns = {suspect.sequence: self._due.get(suspect.sequence, latest) for suspect in waiting}
        turns |= {suspect: latest for suspect in step.sequences if suspect in turns}
        assert all(due >= len(self.steps) for due in turns.values()), "a suspected sequence waits for its turn"
        self._due = turns

    def _tokens(self, step: ScheduledStep, sequence: SequenceId) -> list[int]:
        """The sequence's tokens up to the end of its row, which may assume some that are not known yet."""
        row = step.sequences.index(sequence)
        start = sum(step.num_tokens[:row])
        own, position = step.token_ids[start : start + step.num_tokens[row]], step.positions[row]
        known = [*self.specs[sequence].prompt, *self.output[sequence], *self._surplus[sequence]]
        assert len(known) >= position
        assert [*own][: len(known) - position] == known[position : position + len(own)], "a row has other tokens"
        return [*known[:position], *own]

    def _compute(self, step: ScheduledStep) -> list[list[int]]:
        assert step.last_slice is None or not step.copies, "copies are made by all slices"
        if step.assumed and self._is_void(step):
            self._compute_void(step)
            return [[]]
        tables, windows = self._snapshot.pop(step.step), self._window_snapshot.pop(step.step)
        del self._reads[step.step]
        found: list[list[int]] = []
        for memory in self.slices:
            memory.moves_behind += memory.begun.pop(step.step)
        for index, memory in enumerate(self._memories(step)):
            memory.move_all(limits=self.limits)
            self._write_windows(step, windows, memory.windows)
            self._write_states(step, memory.states)
            found = self._compute_slice(step, tables, memory.slots)
            self.computed[index] += len(step.token_ids)
        return found

    def _is_void(self, step: ScheduledStep) -> bool:
        """Whether the sequence went another way than the step's first token assumes."""
        (sequence,) = step.sequences
        known = [*self.specs[sequence].prompt, *self.output[sequence], *self._surplus[sequence]]
        return step.positions[0] != len(known) - 1 or known[-1] != step.token_ids[0]

    def _compute_void(self, step: ScheduledStep) -> None:
        for memory in self.slices:
            memory.moves_behind += memory.begun.pop(step.step)
            memory.move_all(limits=self.limits)
        self._damage(step._replace(moves=()))
        del self._reads[step.step], self._snapshot[step.step], self._window_snapshot[step.step]

    def _compute_slice(
        self, step: ScheduledStep, tables: dict[SequenceId, list[int]], slots: dict[int, tuple[int, int]]
    ) -> list[list[int]]:
        ids: list[list[int]] = []
        tokens, size = iter(step.token_ids), self.limits.block_size
        for copy in step.copies:
            for offset in range(size):
                slots[copy.target * size + offset] = slots[copy.source * size + offset]
        rows = zip(step.sequences, step.positions, step.num_tokens, step.samples, strict=True)
        for sequence, position, num_tokens, samples in rows:
            table = tables[sequence]
            assert position + num_tokens <= len(table) * size
            slot = [table[p // size] * size + p % size for p in range(position + num_tokens)]
            own = [next(tokens) for _ in range(num_tokens)]
            for p, token in enumerate(own, position):
                slots[slot[p]] = (token, fold(slots[slot[p - 1]][1] if p else 7, token))
            if samples:
                known = self._tokens(step, sequence)[: position + num_tokens - samples + 1]
                ids.append(self._sample(known, slot, own[num_tokens - samples :], slots))
        assert next(tokens, None) is None
        return ids

    def _sample(
        self, known: list[int], slot: list[int], own: list[int], slots: dict[int, tuple[int, int]]
    ) -> list[int]:
        """The tokens after those of a row that it samples from, as long as they are the row's next ones."""
        found: list[int] = []
        for end, following in zip(range(len(slot) - len(own) + 1, len(slot) + 1), [*own[1:], None], strict=True):
            found.append(self._read([*known, *found], slot[:end], slots))
            if found[-1] != following:
                break
        self.windows_seen[len(own) - 1, len(found) - 1] += 1
        return found

    def _read(self, known: list[int], slot: list[int], slots: dict[int, tuple[int, int]]) -> int:
        """The next token from the KV, every slot of which must hold what belongs there."""
        value = 7
        for place, token in zip(slot, known[: len(slot)], strict=True):
            value = fold(value, token)
            assert slots[place] == (token, value), "a slot holds another sequence's token"
        return value % VOCAB

    void: int = 0  # steps of windows in flight whose sequence went another way
    most_flying: int = 0  # windows of a sequence that were in flight when another one followed
    _chains: dict[SequenceId, list[int]] = field(default_factory=dict)  # drafts behind the known tokens
    # On their way: sequence, drafts, position of the first one, newest step that the drafter knew.
    _lots: deque[tuple[SequenceId, Drafts, int, StepId]] = field(default_factory=deque)
    _reads: dict[int, set[int]] = field(default_factory=dict)
    _due: dict[SequenceId, int] = field(default_factory=dict)
    _sampled: dict[int, dict[SequenceId, int]] = field(default_factory=dict)  # newest token of each row, by step
    _surplus: defaultdict[SequenceId, list[int]] = field(default_factory=lambda: defaultdict(list))  # behind the end
    _snapshot: dict[int, dict[SequenceId, list[int]]] = field(default_factory=dict)
    _window_snapshot: dict[int, list[dict[SequenceId, dict[int, int]]]] = field(default_factory=dict)


def spec(sequence: int, prompt: int | Sequence[int] = 4, **more: object) -> SequenceSpec:
    """A sequence with a prompt of that length (or these tokens)."""
    tokens = tuple((sequence * 13 + i * 5) % VOCAB for i in range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    return SequenceSpec(sequence=SequenceId(sequence), prompt=tokens, **more)  # type: ignore[arg-type]


def check_shared_replay(pipeline: SchedulerLimits) -> None:
    """Lose a slice while three sequences with the same beginning run. The slices up to it compute that once again."""
    world = World(pipeline)
    system = [each % 90 for each in range(100)]
    for number in (1, 2, 3):
        world.submit(spec(number, [*system, *([number] * 30)], max_tokens=40))
    world.go(30)
    world.next_epoch(lost=(1,))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert world.computed[0] == world.computed[1] == 100 + 3 * (30 + 40 - 1)
    assert world.computed[2] < 3 * 40


def limits(**changes: Any) -> SchedulerLimits:
    """A small pipeline."""
    defaults: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "context_length": 200, "micro_batches": 2}
    return SchedulerLimits(**{**defaults, **changes})


def windowed(*windows: tuple[int, int], share: int = 4, more: int = 0, **changes: Any) -> SchedulerLimits:
    """A small pipeline with windowed classes: window and slack of each. A pool has a share of the context's blocks."""
    whole = limits(**changes)
    pools = [
        WindowPool(window=window, slack=slack, num_blocks=whole.num_blocks, block_size=whole.block_size, more=more)
        for window, slack in windows
    ]
    return replace(
        whole,
        windows=tuple(
            replace(pool, num_blocks=min(whole.num_blocks, max(whole.num_blocks // share, pool.most_blocks)))
            for pool in pools
        ),
    )


def stateful(*, num_slots: int = 12, gap: int = 32, **changes: Any) -> SchedulerLimits:
    """A small pipeline with recurrent layers."""
    return replace(limits(**changes), states=StateSlots(num_slots=num_slots, gap=gap))
