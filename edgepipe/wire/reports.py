"""Reports of stages to the engine about steps, as values, and their conversion."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from edgepipe.backend.drafting import Drafts
from edgepipe.errors import EdgepipeError, RemoteProtocolError
from edgepipe.ids import Epoch, SequenceId, StepId
from edgepipe.sampling import PromptLogprobs, TokenLogprobs
from edgepipe.wire.bounds import check_numbers
from edgepipe.wire.codec import to_wire, value_of
from edgepipe.wire.common import epoch_of, epoch_to_wire
from edgepipe.wire.errors import error_from_wire, error_to_wire
from edgepipe.wire.sampling import logprobs_from_wire, logprobs_to_wire
from edgepipe.wire.v1 import stage_pb2


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
    drafts: tuple[Drafts, ...] = ()  # drafts behind the tokens of each sampling row; empty: no drafts


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
