"""One step on one slice, from its plan to its output."""

from __future__ import annotations

from typing import Protocol

from edgepipe.backend import cost
from edgepipe.backend.protocol import Prepared
from edgepipe.backend.types import Activations, LogitEdits, StepOutput, TokenIds
from edgepipe.ids import SequenceId, StepId
from edgepipe.link.protocol import SendStats
from edgepipe.sampling import SampleRow, logit_edits
from edgepipe.stage.compute import StepSpan
from edgepipe.stage.drafting import DraftWish
from edgepipe.stage.held_keys import BegunMove
from edgepipe.stage.mtp_drafter import KeptPart
from edgepipe.stage.sequences import ScoredPart
from edgepipe.stage.step_order import StepUses
from edgepipe.wire.reports import StepTiming


class WorkOwner(Protocol):
    """The epoch of a step. ``computed`` and ``broken`` are called on the compute thread."""

    @property
    def over(self) -> bool:
        """Whether the epoch has ended."""
        ...

    def computed(self, work: StageStep, output: StepOutput) -> None:
        """Take the step's output."""
        ...

    def broken(self, work: StageStep, error: Exception) -> None:
        """Take the error of a step that the backend failed to compute."""
        ...


class StageStep:
    """A mutable step, passed from the loop to the compute thread and back; only one of them uses it at a time."""

    __slots__ = (
        "_epoch",
        "_inputs",
        "_owner",
        "after",
        "bulk",
        "demand",
        "expert_share",
        "flies",
        "here",
        "kept",
        "moves",
        "num_rows",
        "num_tokens",
        "prepare_us",
        "prepared",
        "ready_s",
        "retires",
        "samples",
        "scored",
        "sequences",
        "slice_index",
        "span",
        "step",
        "uses",
        "wishes",
    )

    def __init__(
        self,
        owner: WorkOwner,
        *,
        epoch: int,
        step: StepId,
        slice_index: int,
        bulk: bool,
        num_tokens: int,
        num_rows: int,
        demand: cost.StepWork,
        prepared: Prepared,
        prepare_us: int,
        ready_s: float,
        retires: bool,
        flies: bool,
        here: bool,
        samples: tuple[SampleRow, ...],
        wishes: tuple[DraftWish | None, ...],
        kept: tuple[KeptPart, ...],
        scored: tuple[ScoredPart, ...],
        uses: StepUses,
        moves: tuple[BegunMove, ...] = (),
        sequences: tuple[SequenceId, ...] = (),
        after: StepId | None = None,
    ) -> None:
        self._epoch = epoch  # the epoch's counter
        self.step = step
        self.slice_index = slice_index
        self.bulk = bulk  # see ``StepPlan.is_bulk``
        self.num_tokens = num_tokens
        self.num_rows = num_rows
        self.demand = demand
        self.prepared = prepared
        self.prepare_us = prepare_us
        self.ready_s = ready_s  # monotonic: plan and inputs are ready since then
        self.retires = retires  # the step ends with this slice
        self.samples = samples  # rows whose tokens this slice's logits decide
        self.wishes = wishes  # drafts to make for each sampling row; empty: none
        self.flies = flies  # windows of its sequence follow one another in flight: they are sampled in their order
        self.here = here  # the compute thread samples it
        self.kept = kept  # tokens whose output drafters take
        self.scored = scored  # prompt tokens whose log-probabilities this slice computes
        self.uses = uses  # what the step reads and writes on this stage
        self.moves = moves  # between the device and host memory
        self.sequences = sequences  # the sequence of each row
        self.after = after  # the step whose sampled tokens its rows begin with; None: it was not planned ahead
        self.span: StepSpan | None = None  # set once computed
        self.expert_share = 0.0  # see ``StepOutput``
        self._owner = owner
        self._inputs: TokenIds | Activations | None = None

    def give_inputs(self, inputs: TokenIds | Activations, *, arrived_s: float) -> None:
        """Set the step's inputs, which arrived at ``arrived_s`` (monotonic)."""
        self._inputs = inputs
        self.ready_s = max(self.ready_s, arrived_s)

    @property
    def place(self) -> tuple[int, int]:
        """See ``Work.place``."""
        return self._epoch, self.step

    def take_inputs(self) -> TokenIds | Activations:
        """See ``Work.take_inputs``."""
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, "a step is computed once, after its inputs have arrived"
        return inputs

    def edits(self) -> LogitEdits | None:
        """See ``Work.edits``."""
        return logit_edits(self.samples) if self.samples else None

    def wanted(self) -> bool:
        """See ``Work.wanted``."""
        return not self._owner.over

    def done(self, output: StepOutput, span: StepSpan) -> None:
        """See ``Work.done``."""
        self.span, self.expert_share = span, output.expert_share
        self._owner.computed(self, output)

    def failed(self, error: Exception) -> None:
        """See ``Work.failed``."""
        self._owner.broken(self, error)

    def timing(self, *, sample_us: int = 0, draft_us: int = 0, sent: SendStats | None = None) -> StepTiming:
        """Return the timing of the computed step. ``sent``: of the link to the next stage, if another one follows."""
        assert self.span is not None, "not computed yet"
        return StepTiming(
            step=self.step,
            slice_index=self.slice_index,
            num_tokens=self.num_tokens,
            num_rows=self.num_rows,
            started_us=int(self.span.begun_s * 1e6),
            wait_us=int(self.span.idle_s * 1e6),
            prepare_us=self.prepare_us,
            compute_us=int((self.span.collected_s - self.span.begun_s) * 1e6),
            sample_us=sample_us,
            send_queue_us=sent.queue_us if sent is not None else 0,
            upload_us=sent.upload_us if sent is not None else 0,
            upload_bytes=sent.upload_bytes if sent is not None else 0,
            queued_us=max(0, int((self.span.begun_s - self.ready_s) * 1e6)),
            expert_share=self.expert_share,
            draft_us=draft_us,
        )
