"""How many micro-batches are under way: what stages and links report becomes curves, the curves become M."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgepipe.engine.turns import TurnLedger
from edgepipe.ids import StepId
from edgepipe.link.assembly import CHUNK_BYTES
from edgepipe.scheduler import ScheduledStep
from edgepipe.scheduler.sizing import (
    LinkCurve,
    Ring,
    Sizer,
    Sizing,
    StageCurve,
    link_cap_tokens,
    most_micro_batches,
)
from edgepipe.scheduler.tiles import TileEdges
from edgepipe.wire.plans import LinkSample, StepTiming


class MicroBatches:
    """Measures the ring and sizes M by it. Driven by steps and reports; has no timer."""

    def __init__(self, *, slices: Sequence[Sequence[int]], row_bytes: int, fixed: int) -> None:
        """
        slices     indices of each stage's slices, in the order of a token's way
        row_bytes  of one token's activations on a link
        fixed      M if somebody asked for one, else 0
        """
        self._num_stages = len(slices)
        self._fixed = fixed
        self._row_bytes = row_bytes
        self._curves = [{index: StageCurve() for index in of_stage} for of_stage in slices]
        self._links = [LinkCurve() for _ in slices]  # of the last one nothing is heard
        self._tiles = [{index: TileEdges() for index in of_stage} for of_stage in slices]
        self._turns = TurnLedger(num_slices=sum(map(len, slices)), upload_s=self._uploads_s)
        self._sizer = Sizer(num_stages=self._num_stages, fixed=fixed)
        self._before = [0] * self._num_stages  # tokens of the step before
        self.link_cap_tokens: int | None = None  # what the slowest link uploads in a step; None: not known
        self.tile_edges: tuple[int, ...] = ()  # tokens of a step above which some slice takes clearly longer
        self._known_uploads_s: dict[tuple[int, int], float] = {}  # by stage and bytes, until the next look

    @property
    def sizing(self) -> Sizing:
        """The M in use, and why."""
        return self._sizer.sizing

    @property
    def most(self) -> int:
        """The largest M there will be."""
        return self._fixed or most_micro_batches(self._num_stages)

    @property
    def latency_s(self) -> float:
        """Of the whole ring: one-way delays, sampling, the token's return."""
        return self._turns.latency_s

    def decode_s(self, stage: int, rows: float) -> tuple[float, float]:
        """Seconds of a decode step of so many rows on a stage, and of its upload; 0 for what is not known."""
        if not rows:
            return 0.0, 0.0
        at = np.array([rows])
        curves = self._curves[stage].values()
        step_s = float(sum(curve.at(at)[0] for curve in curves)) if all(curve.known for curve in curves) else 0.0
        return step_s, self._links[stage].seconds(round(rows * self._row_bytes))

    def limit(self, *, prompts_wait: bool) -> int:
        """Steps that may be in flight. Chunks of a prompt follow one another through the stages, also where few
        sequences need few micro-batches: while prompts wait, at least one per stage."""
        micro_batches = self.sizing.micro_batches
        return max(micro_batches, self._num_stages) if prompts_wait and not self._fixed else micro_batches

    def sent(self, step: ScheduledStep, now_s: float) -> None:
        """A step's plans left."""
        self._turns.sent(step.step, num_rows=step.num_rows, num_tokens=len(step.token_ids), now_s=now_s)

    def retired(self, step: StepId, now_s: float, *, sequences: int) -> None:
        """A step's token came back, while so many sequences run; from time to time, M is looked at."""
        self._turns.retired(step, now_s)
        if self._sizer.due(sequences=sequences):
            self._known_uploads_s.clear()
            ring = self._ring()
            sizing = self._sizer.decide(ring, sequences=sequences)
            found = {edge for tiles in self._tiles for one in tiles.values() for edge in one.edges()}
            self.tile_edges = tuple(sorted(found))
            self.link_cap_tokens = link_cap_tokens(ring, rows=max(1.0, sequences / sizing.micro_batches))

    def note_timing(self, stage: int, timing: StepTiming) -> None:
        """A stage computed a step on one slice."""
        self._curves[stage][timing.slice_index].note(
            num_rows=timing.num_rows, num_tokens=timing.num_tokens, seconds=timing.compute_us * 1e-6
        )
        self._tiles[stage][timing.slice_index].note(num_tokens=timing.num_tokens, seconds=timing.compute_us * 1e-6)
        self._turns.stayed(timing.step, (timing.queued_us + timing.compute_us + timing.send_queue_us) * 1e-6)
        before, self._before[stage] = self._before[stage], timing.num_tokens
        if timing.upload_us and before:
            self._links[stage].note_upload(num_bytes=before * self._row_bytes, seconds=timing.upload_us * 1e-6)

    def note_link(self, stage: int, sample: LinkSample) -> float:
        """A step reached the stage behind ``stage``; gives the link's one-way latency in seconds.

        Half of what is left of the round trip without the upload: no clock is compared with another one's.
        """
        link = self._links[stage]
        link.note_arrival(
            num_bytes=sample.num_bytes,
            round_trip_s=sample.round_trip_us * 1e-6,
            spread_bytes=sample.num_bytes - CHUNK_BYTES,
            spread_s=(sample.last_received_us - sample.first_received_us) * 1e-6,
        )
        return max(0.0, sample.round_trip_us * 1e-6 - self._upload_s(stage, sample.num_bytes)) / 2

    def _uploads_s(self, num_tokens: int) -> float:
        return sum(self._upload_s(stage, num_tokens * self._row_bytes) for stage in range(self._num_stages))

    def _upload_s(self, stage: int, num_bytes: int) -> float:
        key = (stage, num_bytes)
        seconds = self._known_uploads_s.get(key)
        if seconds is None:
            seconds = self._known_uploads_s[key] = self._links[stage].seconds(num_bytes)
        return seconds

    def _ring(self) -> Ring:
        return Ring(
            stages=[list(curves.values()) for curves in self._curves],
            links=self._links,
            row_bytes=self._row_bytes,
            latency_s=self._turns.latency_s,
        )
