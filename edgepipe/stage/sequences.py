"""A stage's table of sequences, updated by the deltas in plans. Shape letter: R rows that sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgepipe.backend.types import BlockRun, ScoreRows, StepRow, TokenIds, WindowRuns
from edgepipe.errors import EdgepipeError, RemoteProtocolError
from edgepipe.ids import SequenceId
from edgepipe.sampling import SampleRow, SequenceSampler
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.spec.memory_classes import WindowPool
from edgepipe.stage.drafting import DraftWish, SequenceDrafter
from edgepipe.stage.held_keys import BegunMove, HeldKeys
from edgepipe.stage.mtp_drafter import KeptPart, NextIds
from edgepipe.wire.intake import registration_fault
from edgepipe.wire.plans import NewWindow, PlanRow, StepPlan
from edgepipe.wire.registrations import Registration

Runs = tuple[BlockRun, ...]

_MOST_REGISTERED = 4096  # sequences registered but not begun: many times as many as an engine runs


@dataclass(slots=True)
class WindowState:
    """A sequence's block table in one windowed memory class."""

    first: int = 0  # place of the first block that the table still names
    end: int = 0  # place behind its last block
    runs: Runs = ()

    def drop(self, first: int) -> None:
        """Forget the blocks before the place ``first``, which no later row sees."""
        runs = self.runs
        while self.first < first and runs:
            gone = min(runs[0].count, first - self.first)
            rest = () if gone == runs[0].count else (BlockRun(runs[0].start + gone, runs[0].count - gone),)
            runs, self.first = (*rest, *runs[1:]), self.first + gone
        self.runs = runs


@dataclass(slots=True)
class SequenceState:
    """A registered sequence."""

    registration: Registration
    sampler: SequenceSampler | None  # set if this stage has the head
    scored: bool  # whether this stage computes its prompt's log-probabilities
    drafter: SequenceDrafter | None = None  # set if this stage drafts the sequence's tokens
    no_drafts: DraftWish | None = None  # the wish of a row that can use none; set if there is a drafter
    runs: Runs = ()  # block table from token 0, neighbouring runs merged
    num_blocks: int = 0
    windows: tuple[WindowState, ...] = ()  # its blocks of each windowed memory class
    end: int | None = None  # tokens with KV after the newest plan; None before its first row


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """Prompt tokens whose log-probabilities a step computes."""

    sequence: SequenceId
    position: int  # absolute, of the first token
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows:
    """The rows of one step, ready for a backend and for the sampler."""

    rows: tuple[StepRow, ...]
    logit_rows: list[int] = field(default_factory=list[int])  # [R] packed indices of the rows to sample from
    samples: tuple[SampleRow, ...] = ()  # [R]; empty if another stage has the head
    wishes: tuple[DraftWish | None, ...] = ()  # one for each sampling row of the plan; empty if no row has a wish
    scored: tuple[ScoredPart, ...] = ()
    score_rows: ScoreRows | None = None  # rows of all parts, concatenated
    next_ids: TokenIds | None = None  # see ``Step``
    kept: tuple[KeptPart, ...] = ()  # tokens whose output drafters take
    begun: tuple[BegunMove, ...] = ()  # the plan's moves; empty without ``HeldKeys``


class SequenceTable:
    """Applies registrations and plans in order. An invalid one raises RemoteProtocolError and breaks the table."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        windows: Sequence[WindowPool] = (),
        rest_tokens: int = 0,
        state_slots: int = 0,
        host_places: Sequence[int] = (),
        model: ModelBounds,
        new_sampler: Callable[[Registration, EdgepipeError | None], SequenceSampler] | None,
        new_drafter: Callable[[Registration, SequenceSampler], SequenceDrafter] | None = None,
        held: HeldKeys | None = None,
    ) -> None:
        """
        rest_tokens  slots that a sequence needs behind its last token's, see ``kv_forms``
        new_sampler  makes a sampler from a registration and its fault; None if another stage has the head
        new_drafter  makes a drafter from a registration that asks for drafts, and its sampler; None: nothing drafts
        held         hears which places steps will write
        """
        self._held = held
        self._model = model
        self._new_sampler = new_sampler
        self._new_drafter = new_drafter
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._windows = windows
        self._rest_tokens = rest_tokens
        self._state_slots = state_slots
        # Places on the device and in host memory; ``TierMove.number`` is the index.
        device_places = [num_blocks, *[pool.num_blocks for pool in windows], *([state_slots] if state_slots else [])]
        self._move_places = list(zip(device_places, host_places, strict=False))
        self._registered: dict[SequenceId, Registration] = {}  # sequences that have not begun
        self._sequences: dict[SequenceId, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def tell(self, registration: Registration) -> None:
        """Take all or part of the registration of a sequence that a later plan begins. Raises RemoteProtocolError."""
        known = self._registered.get(registration.sequence)
        if not registration.continues:
            self._registered[registration.sequence] = registration
        elif known is not None:
            self._registered[registration.sequence] = known.joined(registration)
        else:
            raise RemoteProtocolError(
                f"a part of sequence {registration.sequence}'s registration came before its beginning"
            )
        if len(self._registered) > _MOST_REGISTERED:
            raise RemoteProtocolError(
                f"sequence {registration.sequence} exceeds the limit",
                fact=f"{_MOST_REGISTERED} others have not begun",
            )

    def apply(self, plan: StepPlan) -> PlannedRows:
        """Apply a plan: free, register, append blocks. Return the step's rows. Raises RemoteProtocolError."""
        for sequence in plan.frees:
            if (left := self._sequences.pop(sequence, None)) is None:
                raise _bad(plan, f"it frees sequence {sequence}, which is not registered")
            self._release(left)
        for sequence in plan.registers:
            if (registration := self._registered.pop(sequence, None)) is None:
                raise _bad(plan, f"it begins sequence {sequence} without a registration")
            self._sequences[sequence] = self._register(registration)
        self._check_copies(plan)
        self._check_moves(plan)
        # A step moves, then copies, then computes: a row may write what its own step's move has brought.
        begun = self._held.begin(plan.moves) if self._held is not None and plan.moves else ()
        if self._held is not None and plan.copies:
            for copy in plan.copies:
                self._held.append(0, BlockRun(copy.target, 1))
        if len({row.sequence for row in plan.rows}) != len(plan.rows):
            raise _bad(plan, "it has two rows of one sequence")
        states = [self._advance(plan, row) for row in plan.rows]
        if any((row.state is not None) != bool(self._state_slots) for row in plan.rows):
            raise _bad(plan, "it names slots of states", f"the pipeline has {self._state_slots}")
        return _rows(plan, states, begun)

    def release_all(self) -> None:
        """Note that no sequence goes on."""
        for state in self._sequences.values():
            self._release(state)
        self._sequences.clear()

    def _release(self, state: SequenceState) -> None:
        if self._held is not None:
            self._held.release((state.runs, *[table.runs for table in state.windows]))

    def _register(self, registration: Registration) -> SequenceState:
        """Create a sequence's state. Ids outside the vocabulary fail only this sequence, when it is sampled."""
        if self._new_sampler is None:
            return SequenceState(registration, None, False, windows=self._empty_windows())
        fault = registration_fault(registration, self._model)
        scored = registration.sampling.prompt_logprobs and fault is None
        sampler = self._new_sampler(registration, fault)
        drafter = None
        if registration.draft and fault is None and self._new_drafter is not None:
            drafter = self._new_drafter(registration, sampler)
        registration = replace(registration, prompt=registration.prompt if scored else (), generated=())
        no_drafts = DraftWish(drafter, 0, registration.sequence) if drafter is not None else None
        return SequenceState(registration, sampler, scored, drafter, no_drafts, windows=self._empty_windows())

    def _empty_windows(self) -> tuple[WindowState, ...]:
        return tuple([WindowState() for _ in self._windows])

    def _advance(self, plan: StepPlan, row: PlanRow) -> SequenceState:
        state = self._sequences.get(row.sequence)
        if state is None:
            raise _bad(plan, f"it has a row of sequence {row.sequence}, which is not registered")
        for run in row.new_blocks:
            self._append(plan, row, state, run)
        for new in row.new_windows:
            self._append_window(plan, row, state, new)
        if row.state is not None and self._held is not None:
            self._held.write_states(row.state)
        self._check_row(plan, row, state)
        state.end = row.position + row.num_tokens
        return state

    def _append(self, plan: StepPlan, row: PlanRow, state: SequenceState, run: BlockRun) -> None:
        if run.count < 1 or run.start + run.count > self._num_blocks:
            raise _bad(
                plan,
                f"it assigns blocks {run.start}-{run.start + run.count - 1}",
                f"there are {self._num_blocks} blocks",
            )
        self._note_writes(0, row, state.num_blocks, run)
        state.runs = _joined(state.runs, run)
        state.num_blocks += run.count

    def _append_window(self, plan: StepPlan, row: PlanRow, state: SequenceState, new: NewWindow) -> None:
        run = new.run
        pool = self._windows[new.number] if new.number < len(self._windows) else None
        if pool is None or run.count < 1 or run.start + run.count > pool.num_blocks:
            raise _bad(
                plan,
                f"it assigns blocks {run.start}-{run.start + run.count - 1} of window {new.number}",
                f"there are {pool.num_blocks} blocks" if pool is not None else f"there are {len(self._windows)}",
            )
        table = state.windows[new.number]
        if not table.runs:
            table.first = table.end = new.place
        if new.place != table.end:
            raise _bad(plan, f"it continues window {new.number} at block {new.place}", f"it ends at {table.end}")
        self._note_writes(1 + new.number, row, new.place, run)
        table.runs, table.end = _joined(table.runs, run), table.end + run.count

    def _note_writes(self, number: int, row: PlanRow, place: int, run: BlockRun) -> None:
        """Note that steps will write new blocks of a sequence. Those before its first row's tokens are shared ones.

        place  in the sequence, of the run's first block
        """
        if self._held is not None:
            shared = row.position // self._block_size - place
            self._held.append(number, run, shared=min(max(0, shared), run.count))

    def _check_row(self, plan: StepPlan, row: PlanRow, state: SequenceState) -> None:
        end, room = row.position + row.num_tokens, state.num_blocks * self._block_size - self._rest_tokens
        if row.num_tokens < 1:
            raise _bad(plan, f"sequence {row.sequence} has a row without tokens")
        if row.sample > row.num_tokens:
            raise _bad(plan, f"sequence {row.sequence} samples after {row.sample} of {row.num_tokens} tokens")
        if end > room:
            raise _bad(plan, f"sequence {row.sequence} would have {end} tokens", f"its blocks hold {room}")
        if state.end is not None and row.position > state.end:
            raise _bad(
                plan, f"sequence {row.sequence} continues at position {row.position}", f"its KV ends at {state.end}"
            )
        if self._windows:
            self._check_windows(plan, row, state)

    def _check_windows(self, plan: StepPlan, row: PlanRow, state: SequenceState) -> None:
        """Forget the blocks that no later row sees, and check that the tables have those that this row sees."""
        end = row.position + row.num_tokens
        for number, (pool, table) in enumerate(zip(self._windows, state.windows, strict=True)):
            table.drop(pool.first_block(row.position - pool.most_slack))
            first, last = pool.first_block(row.position), (end + self._rest_tokens - 1) // self._block_size
            if not table.first <= first <= last < table.end:
                raise _bad(
                    plan,
                    f"sequence {row.sequence} needs blocks {first}-{last} of window {number}",
                    f"its table has {table.first}-{table.end - 1}",
                )

    def _check_copies(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            if max(copy.source, copy.target) >= self._num_blocks:
                raise _bad(
                    plan, f"it copies block {copy.source} to {copy.target}", f"there are {self._num_blocks} blocks"
                )

    def _check_moves(self, plan: StepPlan) -> None:
        for move in plan.moves:
            places = self._move_places[move.number] if move.number < len(self._move_places) else (0, 0)
            if move.place >= places[0] or move.kept >= places[1]:
                raise _bad(
                    plan,
                    f"it moves {move.place} of memory class {move.number} to or from host memory {move.kept}",
                    f"{places[0]} places and {places[1]} of host memory are there",
                )


def _joined(runs: Runs, run: BlockRun) -> Runs:
    """Append a run and join it with the last one if they are neighbours."""
    last = runs[-1] if runs else None
    if last is not None and last.start + last.count == run.start:
        return (*runs[:-1], BlockRun(last.start, last.count + run.count))
    return (*runs, run)


def _rows(plan: StepPlan, states: list[SequenceState], begun: tuple[BegunMove, ...]) -> PlannedRows:
    rows: list[StepRow] = []
    logit_rows: list[int] = []
    samples: list[SampleRow] = []
    wishes: list[DraftWish | None] = []
    scores, following = _Scores(), NextIds()
    packed = 0
    for row, state in zip(plan.rows, states, strict=True):
        rows.append(
            StepRow(
                sequence=row.sequence,
                position=row.position,
                num_tokens=row.num_tokens,
                runs=state.runs,
                windows=tuple([WindowRuns(table.first, table.runs) for table in state.windows])
                if state.windows
                else (),
                state=row.state,
            )
        )
        if state.scored:
            scores.add(row, state.registration, packed)
        follows = state.drafter.follows if state.drafter is not None else None
        following.add(follows, row.position, row.num_tokens, state.runs)
        packed += row.num_tokens
        if row.sample:
            first = packed - row.sample
            logit_rows.extend(range(first, packed))
            position = _output_position(plan, row, state.registration)
            if state.sampler is not None:
                own = _own_tokens(plan, row, first)
                given = own[0] if plan.assumed else None
                samples += [
                    SampleRow(state.sampler, position + at, draft, None if at else given)
                    for at, draft in enumerate((*own[1:], None))
                ]
                wish = state.no_drafts  # most rows of a filled ring have this one
                if wish is not None and (row.draft or plan.lot):
                    wish = DraftWish(wish.drafter, row.draft, row.sequence, plan.lot)
                wishes.append(wish)
    return PlannedRows(
        rows=tuple(rows),
        logit_rows=logit_rows,
        samples=tuple(samples),
        wishes=tuple(wishes) if any(wishes) else (),
        scored=tuple(scores.parts),
        score_rows=scores.finish(),
        next_ids=following.finish(),
        kept=tuple(following.parts),
        begun=begun,
    )


class _Scores:
    """Rows of prompt tokens with known successors to score."""

    def __init__(self) -> None:
        self.parts: list[ScoredPart] = []
        self._rows: list[int] = []
        self._targets: list[int] = []
        self._num_top = 0

    def add(self, row: PlanRow, registration: Registration, packed: int) -> None:
        targets = registration.prompt[row.position + 1 : row.position + 1 + row.num_tokens]
        if targets:
            self.parts.append(ScoredPart(row.sequence, row.position + 1, len(targets)))
            self._rows.extend(range(packed, packed + len(targets)))
            self._targets.extend(targets)
            self._num_top = max(self._num_top, registration.sampling.top_logprobs)

    def finish(self) -> ScoreRows | None:
        if not self.parts:
            return None
        rows, targets = packed_indices(self._rows), packed_indices(self._targets)
        return ScoreRows(rows=rows, targets=targets, num_top=self._num_top)


def _own_tokens(plan: StepPlan, row: PlanRow, first: int) -> tuple[int, ...]:
    """Return the tokens that the row samples after, where it assumes some of them. ``first``: their packed index."""
    if row.sample == 1 and not plan.assumed:
        return ()
    if len(plan.token_ids) != plan.num_tokens:
        raise _bad(plan, f"sequence {row.sequence} samples {row.sample} tokens", "the row's tokens are missing")
    return plan.token_ids[first : first + row.sample]


def _output_position(plan: StepPlan, row: PlanRow, registration: Registration) -> int:
    """Return the output position of the first token that the row samples."""
    position = row.position + row.num_tokens - row.sample + 1 - registration.prompt_tokens
    if position < 0:
        raise _bad(
            plan,
            f"sequence {row.sequence} samples inside its prompt",
            f"the prompt has {registration.prompt_tokens} tokens",
        )
    return position


def packed_indices(logit_rows: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the indices ``[R]`` as int32."""
    return np.array(logit_rows, np.int32)


def _bad(plan: StepPlan, problem: str, fact: str = "") -> RemoteProtocolError:
    return RemoteProtocolError(f"the plan of step {plan.step} is invalid: {problem}", fact=fact)
