"""Messages about steps between an engine and its stages, as values, and their conversion.

Shape letters: T packed tokens of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from edgepipe.backend.drafting import Drafts
from edgepipe.backend.types import ActivationType, BlockCopy, BlockRun, RowState, StateWrite, TierMove
from edgepipe.errors import EdgepipeError, RemoteProtocolError
from edgepipe.ids import Epoch, NodeId, PipelineId, SequenceId, StepId
from edgepipe.sampling import PromptLogprobs, SamplingParams, TokenLogprobs
from edgepipe.scheduler.types import singles
from edgepipe.spec.facts import Slice
from edgepipe.wire.bounds import check_numbers
from edgepipe.wire.codec import from_wire, to_wire, value_of
from edgepipe.wire.common import Hello, epoch_of, epoch_to_wire, hello_to_wire
from edgepipe.wire.errors import error_from_wire, error_to_wire
from edgepipe.wire.sampling import logprobs_from_wire, logprobs_to_wire, sampling_from_wire, sampling_to_wire
from edgepipe.wire.sizes import ID_BYTES, KEY_BYTES, MAX_END_IDS, MAX_PLANS, PACKED_BYTES
from edgepipe.wire.v1 import common_pb2, stage_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNeighbour:
    """The previous or next stage, as its daemon reported it to the engine."""

    node_id: NodeId
    certificate: bytes = b""  # PEM; empty without encryption


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """A stage's constants for one epoch."""

    pipeline_id: PipelineId
    epoch: Epoch
    slices: tuple[Slice, ...]  # slices of this stage
    num_slices: int  # slices of the whole pipeline
    hidden_size: int
    activation_type: ActivationType
    num_blocks: int
    block_size: int  # tokens
    window_blocks: tuple[int, ...] = ()  # blocks of each windowed memory class; empty: all layers keep the context
    state_slots: int = 0  # slots of recurrent layers' states; 0: no layer is recurrent
    host_places: tuple[int, ...] = ()  # see ``Backend.allocate_kv``
    disk_places: tuple[int, ...] = ()  # on disk below host memory, of the same classes; empty: no such disk
    kv_digest: bytes = b""  # of what the KV of the same tokens depends on: equal digests mean equal KV
    asks_held: bool = False  # the engine does not know what is below the device: ``HeldPlaces`` ahead of ``Opened``
    next_address: str  # HOST:PORT of the stage with the next slice; "" for the last
    max_in_flight: int  # steps
    step_deadline_ms: int
    next: RingNeighbour | None = None  # identity of the stage at ``next_address``
    previous: RingNeighbour | None = None  # the stage that sends activations


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRing:
    """The constants of a Ring stream."""

    pipeline_id: PipelineId
    epoch: Epoch
    slice: int  # index of the slice that the stream feeds
    hidden_size: int
    activation_type: ActivationType


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A sequence that later rows refer to by number. A known number is replaced and its block table emptied.

    A long registration is sent in parts: continuing parts have columns of ids to append.
    """

    sequence: SequenceId
    sampling: SamplingParams
    choice: int = 0
    prompt_tokens: int  # absolute position p is output position p - prompt_tokens
    prompt: tuple[int, ...] = ()  # prompt tokens in order, if ``sampling.prompt_logprobs`` or ``draft``
    seen: tuple[int, ...] = ()  # prompt tokens, unique and ascending, if ``sampling.penalises_prompt``
    generated: tuple[int, ...] = ()  # output tokens so far, if ``sampling.needs_output`` or ``draft``
    end_ids: tuple[int, ...] = ()  # EOS and stop ids, if ``sampling.min_tokens``
    continues: bool = False
    draft: str = ""  # "auto" | "lookup" | "mtp" | "model": what drafts its tokens; empty: nothing

    def joined(self, part: Registration) -> Registration:
        """Return this registration with a continuing part appended."""
        return replace(
            self,
            prompt=self.prompt + part.prompt,
            seen=self.seen + part.seen,
            generated=self.generated + part.generated,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Registrations:
    """Registrations for a stage, sent before the plans that begin the sequences."""

    epoch: Epoch
    sequences: tuple[Registration, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Times of one step on one slice."""

    step: StepId
    slice_index: int
    num_tokens: int
    num_rows: int  # see ``ScheduledStep.num_singles``
    started_us: int  # stage's monotonic clock: submitted, and the previous step done
    wait_us: int = 0  # device idle before it
    prepare_us: int = 0
    compute_us: int = 0  # time from ``started_us`` until collect returned
    sample_us: int = 0
    send_queue_us: int = 0  # wait in the send queue, of the newest step that has left: usually the previous one
    upload_us: int = 0  # the same step's upload
    queued_us: int = 0  # time from plan and inputs ready until ``started_us``
    expert_share: float = 0.0  # share of a layer's experts that the step read, mean of its layers; 0: not counted
    upload_bytes: int = 0  # size of the step that ``upload_us`` describes
    draft_us: int = 0  # drafting for its sequences, after sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """Times of one step's activations on one link, on the wall clocks of two machines."""

    step: StepId
    num_bytes: int
    first_sent_us: int  # sender's wall clock
    first_received_us: int  # receiver's wall clock, of the first piece
    last_received_us: int  # receiver's wall clock
    told_us: int = 0  # receiver's wall clock, when the credit left
    acknowledged_us: int = 0  # sender's wall clock, when it came back
    spread_bytes: int = 0  # bytes of all steps that came after the first piece, until ``last_received_us``

    @property
    def round_trip_us(self) -> int:
        """Round trip without the time at the receiver: upload and twice the latency. Needs no common clock."""
        return (self.acknowledged_us - self.first_sent_us) - (self.told_us - self.last_received_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step is retired.

    A row that ``failures`` does not name has at least one token, unless its step is ``assumed``.
    """

    epoch: Epoch
    step: StepId
    ids: tuple[tuple[int, ...], ...] = ()  # tokens of each sampling row, in row order
    timings: tuple[StepTiming, ...] = ()
    # (index into the ids of all rows, log-probabilities), where requested
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    prompt_logprobs: tuple[tuple[SequenceId, PromptLogprobs], ...] = ()
    failures: tuple[tuple[int, EdgepipeError], ...] = ()  # (sampling row, reason why no further token was sampled)
    drafts: tuple[Drafts, ...] = ()  # what may follow the tokens of each sampling row; empty: no drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """Drafts of a sequence's tokens, for windows in flight. They assume all drafts of it that came before."""

    epoch: Epoch
    step: StepId  # the newest step whose tokens of the sequence the drafter had
    sequence: SequenceId
    position: int  # absolute, of the first draft
    ids: tuple[int, ...]
    sources: tuple[int, ...]
    took_us: int = 0  # for all of them; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeOpened:
    """The stage that embeds takes the tokens of the stage that samples."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCopies:
    """Copies of blocks or states of one memory class between host memory and the disk."""

    epoch: Epoch
    number: int  # from 1
    memory_class: int  # as ``TierMove.number``
    out: bool  # to disk; else to host memory
    host_places: tuple[int, ...]
    disk_places: tuple[int, ...]
    afresh: bool = False  # the disk rested: what it holds is worth nothing, and a stage with a problem opens a new file


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacesBack:
    """Places in host memory that nothing uses, whose memory a stage gives back to the system."""

    epoch: Epoch
    memory_class: int  # as ``TierMove.number``
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPlaces:
    """What some places of one memory class hold below the device, the longest unused first."""

    epoch: Epoch
    memory_class: int  # as ``TierMove.number``
    on_disk: bool  # else in host memory
    places: tuple[int, ...]
    keys: bytes  # KEY_BYTES for each place


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """How much of its host memory below the device a stage may use now."""

    epoch: Epoch
    permille: int  # of the places
    available_bytes: int = 0  # what the machine has left for all programs; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCopied:
    """A stage's answer to ``DiskCopies``."""

    epoch: Epoch
    number: int
    failed: tuple[int, ...] = ()  # copies that were not made, by their place in the columns
    took_us: int = 0  # 0: not known
    problem: str = ""  # why the stage does not use its disk; empty: it does


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeTokens:
    """Tokens that came to the stage that embeds, for the steps after this one."""

    step: StepId
    ids: tuple[int, ...]  # one for each row that samples


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimings:
    """Timings of a stage that sends no StepDone, at most every 100 ms."""

    timings: tuple[StepTiming, ...] = ()
    links: tuple[LinkSample, ...] = ()
    home: tuple[HomeTokens, ...] = ()


Command = StepPlan | Registrations | DiskCopies | PlacesBack
"""What an engine says to the stages of an open epoch."""


def spec_to_wire(spec: PipelineSpec, hello: Hello) -> stage_pb2.OpenPipeline:
    """Make the first message of a Control stream."""
    message = to_wire(spec, stage_pb2.OpenPipeline)
    message.hello.CopyFrom(hello_to_wire(hello))
    return message


def spec_from_wire(message: stage_pb2.OpenPipeline) -> PipelineSpec:
    """Convert a stage's constants. Raises RemoteProtocolError for an invalid number."""
    if not message.slices:
        raise RemoteProtocolError("the pipeline cannot be opened: this stage has no slice")
    return from_wire(message, PipelineSpec)


def commands_from_wire(
    message: stage_pb2.ControlMessage,
) -> Sequence[Command]:
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
    )


def done_to_wire(done: StepDone) -> stage_pb2.StageReport:
    """Convert the report that retires a step."""
    return stage_pb2.StageReport(
        step_done=stage_pb2.StepDone(
            epoch=epoch_to_wire(done.epoch),
            step=done.step,
            ids=[token for row in done.ids for token in row],
            num_ids=[*map(len, done.ids)],
            drafts=[token for row in done.drafts for token in row.ids],
            draft_sources=[source for row in done.drafts for source in row.sources],
            num_drafts=[len(row.ids) for row in done.drafts],
            timings=[to_wire(timing, stage_pb2.StepTiming) for timing in done.timings],
            logprobs=[
                stage_pb2.SampledLogprobs(index=index, token=logprobs_to_wire(token)) for index, token in done.logprobs
            ],
            prompt_logprobs=[
                stage_pb2.PromptLogprobs(
                    sequence=sequence,
                    position=part.position,
                    tokens=[logprobs_to_wire(token) for token in part.tokens],
                )
                for sequence, part in done.prompt_logprobs
            ],
            failures=[
                stage_pb2.SampleFailure(index=index, error=error_to_wire(error)) for index, error in done.failures
            ],
        )
    )


def done_from_wire(message: stage_pb2.StepDone) -> StepDone:
    """Convert a received report that retires a step. Raises RemoteProtocolError."""
    check_numbers(message)
    return StepDone(
        epoch=epoch_of(message.epoch),
        step=StepId(message.step),
        ids=_ids_by_row(message),
        timings=tuple([value_of(timing, StepTiming) for timing in message.timings]),
        logprobs=tuple([(each.index, logprobs_from_wire(each.token)) for each in message.logprobs]),
        prompt_logprobs=tuple(
            [(SequenceId(part.sequence), value_of(part, PromptLogprobs)) for part in message.prompt_logprobs]
        ),
        failures=tuple([(each.index, error_from_wire(each.error)) for each in message.failures]),
        drafts=_drafts(message) if message.num_drafts else (),
    )


def _ids_by_row(message: stage_pb2.StepDone) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each row. Raises RemoteProtocolError."""
    ids, counts = tuple(message.ids), tuple(message.num_ids)
    if counts == (1,) * len(ids):  # no windows
        return tuple(zip(ids, strict=True))
    ends = [0, *accumulate(counts)]
    if ends[-1] != len(ids):
        raise RemoteProtocolError(
            f"the report of step {message.step} has other ids than it counts",
            fact=f"{len(ids)} came, its rows have {ends[-1]}",
        )
    return tuple([ids[start:end] for start, end in pairwise(ends)])


def _drafts(message: stage_pb2.StepDone) -> tuple[Drafts, ...]:
    """Return the drafts of each row. Raises RemoteProtocolError."""
    ids, sources, ends = tuple(message.drafts), tuple(message.draft_sources), [0, *accumulate(message.num_drafts)]
    if not ends[-1] == len(ids) == len(sources):
        raise RemoteProtocolError(
            f"the report of step {message.step} has other drafts than it counts",
            fact=f"{len(ids)} came with {len(sources)} sources, its rows have {ends[-1]}",
        )
    return tuple([Drafts(ids[start:end], sources[start:end]) for start, end in pairwise(ends)])


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


def keys_of(packed: bytes) -> Iterator[bytes]:
    """Yield the keys of blocks and snapshots that lie one behind another."""
    return (packed[begin : begin + KEY_BYTES] for begin in range(0, len(packed), KEY_BYTES))


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


def registrations_to_wire(
    registrations: Iterable[Registration], *, epoch: common_pb2.Epoch, with_sampling: bool
) -> list[stage_pb2.ControlMessage]:
    """Pack registrations into as few messages of at most PACKED_BYTES as possible.

    Only the stage with the head gets the sampling parameters.
    """
    messages: list[stage_pb2.ControlMessage] = []
    room = 0
    for part in _parts(registrations, with_sampling=with_sampling):
        size = part.ByteSize() + _FIELD_BYTES
        if size > room:
            messages.append(stage_pb2.ControlMessage(register=stage_pb2.Registrations(epoch=epoch)))
            room = PACKED_BYTES - messages[-1].ByteSize() - _FIELD_BYTES
        messages[-1].register.sequences.append(part)
        room -= size
    return messages


def registration_bytes(
    sampling: SamplingParams, *, prompt_tokens: int, vocab_size: int, drafts: bool = False
) -> tuple[int, int]:
    """Return the maximum size of a registration without output, and the bytes per known output token.

    ``drafts``: its tokens are drafted.
    """
    grammar = len(sampling.grammar.text.encode()) if sampling.grammar is not None else 0
    prompt = prompt_tokens if sampling.prompt_logprobs or drafts else 0
    seen = min(prompt_tokens, vocab_size) if sampling.penalises_prompt else 0
    ends = MAX_END_IDS if sampling.min_tokens else 0
    fixed = _HEAD_BYTES + grammar + _BIAS_BYTES * len(sampling.logit_bias) + ID_BYTES * (prompt + seen + ends)
    return fixed, ID_BYTES if sampling.needs_output or drafts else 0


def registrations_from_wire(message: stage_pb2.Registrations) -> Registrations:
    """Convert received registrations. Raises RequestInvalid, RemoteProtocolError."""
    check_numbers(message)
    return Registrations(
        epoch=epoch_of(message.epoch),
        sequences=tuple(_registration_from_wire(register) for register in message.sequences),
    )


_HEAD_BYTES = 256  # size of all numbers of a registration
_BIAS_BYTES = ID_BYTES + 8
_FIELD_BYTES = 16  # overhead of a part, or of the message's field
_PART_IDS = PACKED_BYTES // 2 // ID_BYTES  # the other half is for the rest, mainly a grammar


def _parts(registrations: Iterable[Registration], *, with_sampling: bool) -> Iterator[stage_pb2.Register]:
    for registration in registrations:
        if not with_sampling:
            yield stage_pb2.Register(sequence=registration.sequence, prompt_tokens=registration.prompt_tokens)
            continue
        columns = [
            (name, ids[start : start + _PART_IDS])
            for name, ids in (
                ("prompt", registration.prompt),
                ("seen_steps", registration.seen),
                ("generated", registration.generated),
            )
            for start in range(0, len(ids), _PART_IDS)
        ]
        part = _registration_head(registration)
        room = _PART_IDS
        for name, ids in columns:
            if len(ids) > room:
                yield part
                part, room = stage_pb2.Register(sequence=registration.sequence, continues=True), _PART_IDS
            getattr(part, name).extend(_steps(ids) if name == "seen_steps" else ids)
            room -= len(ids)
        yield part


def _registration_head(registration: Registration) -> stage_pb2.Register:
    """Convert a registration without its long columns."""
    return stage_pb2.Register(
        sequence=registration.sequence,
        sampling=sampling_to_wire(registration.sampling),
        choice=registration.choice,
        prompt_tokens=registration.prompt_tokens,
        end_ids=registration.end_ids,
        draft=registration.draft,
    )


def _steps(ascending: tuple[int, ...]) -> Iterator[int]:
    """Yield the differences between neighbours: most take one byte."""
    return (after - before for before, after in pairwise((0, *ascending)))


def _registration_from_wire(message: stage_pb2.Register) -> Registration:
    return Registration(
        sequence=SequenceId(message.sequence),
        sampling=sampling_from_wire(message.sampling),
        choice=message.choice,
        prompt_tokens=message.prompt_tokens,
        prompt=tuple(message.prompt),
        seen=tuple(accumulate(message.seen_steps)),
        generated=tuple(message.generated),
        end_ids=tuple(message.end_ids),
        continues=message.continues,
        draft=message.draft,
    )
