"""Plans of steps and the engine's other messages to a stage, as values, and their conversion.

Shape letters: T packed tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from edgepipe.backend.types import BlockCopy, BlockRun, RowState, StateWrite, TierMove
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import Epoch, SequenceId, StepId
from edgepipe.scheduler.place_keys import PlaceKey
from edgepipe.scheduler.types import singles
from edgepipe.wire.bounds import check_numbers
from edgepipe.wire.codec import from_wire
from edgepipe.wire.common import epoch_of
from edgepipe.wire.registrations import Registrations, registrations_from_wire
from edgepipe.wire.sizes import KEY_BYTES, MAX_PLANS
from edgepipe.wire.tiers import DiskCopies, NewKeys, PlacesBack, keys_of, place_keys
from edgepipe.wire.v1 import stage_pb2


@dataclass(frozen=True, slots=True)
class NewWindow:
    """New blocks of one windowed memory class of a sequence."""

    number: int  # number of the windowed class, from 0
    place: int  # place of the run's first block in the sequence
    run: BlockRun


class PlanRow(NamedTuple):
    """The tokens ``[position, position + num_tokens)`` of a registered sequence, and new blocks for them."""

    sequence: SequenceId
    position: int  # absolute
    num_tokens: int
    # Number of its last tokens that get logits. A token is sampled from the first of them, and from each next one as
    # long as the sampled token is the row's next token.
    sample: int = 0
    new_blocks: tuple[BlockRun, ...] = ()  # appended to the sequence's block table
    new_windows: tuple[NewWindow, ...] = ()  # appended to its tables of windowed classes
    state: RowState | None = None  # slots of its state; None: no layer is recurrent
    draft: int = 0  # most drafts to return with its tokens


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step, as the engine sends it to every stage. Holds only changes since earlier plans."""

    epoch: Epoch
    step: StepId
    last_slice: int  # the stage of this slice sends StepDone
    rows: tuple[PlanRow, ...] = ()
    token_ids: tuple[int, ...] = ()  # [T], only for the stage that embeds; for the head's, if a row holds drafts
    after: StepId | None = None  # the step whose sampled tokens the rows begin with; None: ``token_ids`` has them
    home: bool = False  # the sampled tokens also go to the stage that embeds: later plans may have rows after this step
    registers: tuple[SequenceId, ...] = ()  # sequences that begin in this step; applied before the rows
    frees: tuple[SequenceId, ...] = ()  # applied before the registers
    copies: tuple[BlockCopy, ...] = ()
    moves: tuple[TierMove, ...] = ()  # see ``ScheduledStep``
    lot: int = 0  # see ``ScheduledStep``
    assumed: bool = False  # see ``ScheduledStep``
    keys: tuple[PlaceKey, ...] = ()  # see ``ScheduledStep``

    @cached_property
    def num_tokens(self) -> int:
        """T."""
        return sum([row.num_tokens for row in self.rows])

    @cached_property
    def num_singles(self) -> int:
        """See ``ScheduledStep.num_singles``."""
        return singles([row.sample for row in self.rows], num_tokens=self.num_tokens)

    @cached_property
    def is_bulk(self) -> bool:
        """Whether the step has prompt tokens: its activations take many messages, and express steps pass them."""
        return self.num_tokens > self.num_singles


ControlCommand = StepPlan | Registrations | DiskCopies | PlacesBack | NewKeys
"""What an engine says to the stages of an open epoch."""


def commands_from_wire(
    message: stage_pb2.ControlMessage,
) -> Sequence[ControlCommand]:
    """Convert an engine's message of an open epoch. Raises RemoteProtocolError, RequestInvalid."""
    if message.HasField("plan"):
        if len(message.next_plans) >= MAX_PLANS:
            raise RemoteProtocolError(
                "the engine sent too many plans together", fact=f"{1 + len(message.next_plans)}, at most {MAX_PLANS}"
            )
        return [plan_from_wire(message.plan), *map(plan_from_wire, message.next_plans)]
    if message.HasField("register"):
        return [registrations_from_wire(message.register)]
    if message.HasField("disk"):
        return [from_wire(message.disk, DiskCopies)]
    if message.HasField("back"):
        return [from_wire(message.back, PlacesBack)]
    if message.HasField("keys"):
        return [from_wire(message.keys, NewKeys)]
    raise RemoteProtocolError("the engine sent an unknown message instead of a plan")


def plan_from_wire(message: stage_pb2.Plan) -> StepPlan:
    """Convert a received plan. Raises RemoteProtocolError if columns of a group differ in length."""
    check_numbers(message)
    num_rows = len(message.sequence)
    _check_columns(message, num_rows)
    none: list[tuple[()]] = [()] * num_rows
    rows = map(
        PlanRow,
        map(SequenceId, message.sequence),
        message.position,
        message.num_tokens,
        message.sample,
        _blocks_by_row(message, num_rows) if message.block_row else none,
        _windows_by_row(message, num_rows) if message.windows else none,
        _states_by_row(message, num_rows) or [None] * num_rows,
        message.draft or [0] * num_rows,
    )
    return StepPlan(
        epoch=epoch_of(message.epoch),
        step=StepId(message.step),
        last_slice=message.last_slice,
        rows=tuple(rows),
        token_ids=tuple(message.token_ids),
        after=StepId(message.after) if message.after else None,
        home=message.home,
        registers=tuple(map(SequenceId, message.registers)),
        frees=tuple(map(SequenceId, message.frees)),
        copies=tuple([BlockCopy(copy.source, copy.target) for copy in message.copies]),
        moves=_moves(message),
        lot=message.lot,
        assumed=message.assumed,
        keys=place_keys(message.key_class, message.key_place, message.keys) if message.key_class else (),
    )


def _check_columns(message: stage_pb2.Plan, num_rows: int) -> None:
    if len(message.draft) not in (0, num_rows):
        raise RemoteProtocolError(
            f"the plan of step {message.step} asks for drafts of other rows", fact=f"it has {num_rows} rows"
        )
    if not num_rows == len(message.position) == len(message.num_tokens) == len(message.sample):
        raise RemoteProtocolError(
            f"the plan of step {message.step} has columns of different lengths",
            fact=f"{num_rows} sequences, {len(message.position)} positions, {len(message.num_tokens)} token counts, "
            f"{len(message.sample)} sample marks",
        )
    if not len(message.block_row) == len(message.block_start) == len(message.block_count):
        raise RemoteProtocolError(f"the plan of step {message.step} has block columns of different lengths")
    if message.block_row and max(message.block_row) >= num_rows:
        raise RemoteProtocolError(
            f"the plan of step {message.step} assigns blocks to a missing row", fact=f"it has {num_rows} rows"
        )


def _moves(message: stage_pb2.Plan) -> tuple[TierMove, ...]:
    columns = message.move_class, message.move_place, message.move_kept, message.move_out
    if len({len(column) for column in columns}) > 1:
        raise RemoteProtocolError(f"the plan of step {message.step} has columns of moves of different lengths")
    if len(message.move_keys) not in (0, KEY_BYTES * sum(message.move_out)):
        raise RemoteProtocolError(f"the plan of step {message.step} has keys of other moves than it names")
    if not message.move_class:
        return ()
    keys = keys_of(message.move_keys)
    return tuple([TierMove(*move, key=next(keys, b"") if move[-1] else b"") for move in zip(*columns, strict=True)])


def _blocks_by_row(message: stage_pb2.Plan, num_rows: int) -> list[tuple[BlockRun, ...]]:
    blocks: list[list[BlockRun]] = [[] for _ in range(num_rows)]
    for row, start, count in zip(message.block_row, message.block_start, message.block_count, strict=True):
        blocks[row].append(BlockRun(start, count))
    return [*map(tuple, blocks)]


def _states_by_row(message: stage_pb2.Plan, num_rows: int) -> list[RowState]:
    """Return each row's slots; none if the plan names no slots. Raises RemoteProtocolError."""
    if not len(message.state_row) == len(message.state_after) == len(message.state_slot):
        raise RemoteProtocolError(f"the plan of step {message.step} has state columns of different lengths")
    if len(message.state_read) not in (0, num_rows) or any(row >= len(message.state_read) for row in message.state_row):
        raise RemoteProtocolError(
            f"the plan of step {message.step} names states of other rows", fact=f"it has {num_rows} rows"
        )
    writes: list[list[StateWrite]] = [[] for _ in message.state_read]
    for row, after, slot in zip(message.state_row, message.state_after, message.state_slot, strict=True):
        writes[row].append(StateWrite(after, slot))
    return [
        RowState(read - 1 if read else None, tuple(own)) for read, own in zip(message.state_read, writes, strict=True)
    ]


def _windows_by_row(message: stage_pb2.Plan, num_rows: int) -> list[tuple[NewWindow, ...]]:
    """Return each row's new blocks of windowed classes. Raises RemoteProtocolError."""
    windows: list[list[NewWindow]] = [[] for _ in range(num_rows)]
    for number, blocks in enumerate(message.windows):
        if not len(blocks.row) == len(blocks.place) == len(blocks.start) == len(blocks.count):
            raise RemoteProtocolError(f"the plan of step {message.step} has window columns of different lengths")
        if any(row >= num_rows for row in blocks.row):
            raise RemoteProtocolError(
                f"the plan of step {message.step} assigns blocks to a missing row", fact=f"it has {num_rows} rows"
            )
        for row, place, start, count in zip(blocks.row, blocks.place, blocks.start, blocks.count, strict=True):
            windows[row].append(NewWindow(number, place, BlockRun(start, count)))
    return [*map(tuple, windows)]
