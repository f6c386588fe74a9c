"""The engine's status report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edgepipe.engine.engine_epoch import EngineEpoch
from edgepipe.engine.sites import StageSite
from edgepipe.scheduler.drafting import DraftStats
from edgepipe.scheduler.pacing import Chunk
from edgepipe.wire.engines import DraftState, EngineState, PromptSteps, StageState


class EngineStatus:
    """An engine's visible state: noted facts, and the numbers of the running epoch."""

    def __init__(self, base: EngineState, on_state: Callable[[EngineState], None]) -> None:
        """``on_state``: called at every change."""
        self.base = base
        self._on_state = on_state
        self._last: EngineState | None = None
        self._rows = 0.0  # rows of a micro-batch when a sequence last ran

    def state(self, run: EngineEpoch | None) -> EngineState:
        """Return the current state."""
        if run is None:
            return self.base
        pump, stats = run.pump, run.pump.stats()
        sizing = pump.micro_batches.sizing
        rows = stats.running / min(sizing.micro_batches, stats.running) if stats.running else 0.0
        self._rows = rows or self._rows  # an idle ring shows the times of its last steps
        decodes = [pump.micro_batches.decode_s(index, self._rows) for index in range(len(pump.meters))]
        stages = tuple(
            replace(meter.measured(stage), decode_ms=1e3 * step_s, decode_upload_ms=1e3 * upload_s)
            for stage, meter, (step_s, upload_s) in zip(self.base.stages, pump.meters, decodes, strict=True)
        )
        return replace(
            self.base,
            micro_batches=sizing.micro_batches,
            why=sizing.why,
            bottleneck=sizing.bottleneck,
            predicted_tokens_per_s=sizing.tokens_per_s,
            decode_rows=rows,
            latency_ms=pump.micro_batches.latency_s * 1e3,
            in_flight=stats.in_flight,
            running=stats.running,
            waiting=stats.waiting,
            num_blocks=stats.num_blocks,
            free_blocks=stats.free_blocks,
            state_slots=stats.state_slots,
            free_slots=stats.free_slots,
            missed_snapshots=stats.missed_snapshots,
            host_blocks=stats.host_blocks,
            used_host_blocks=stats.used_host_blocks,
            restored_tokens=stats.restored_tokens,
            disk_blocks=stats.disk_blocks,
            used_disk_blocks=stats.used_disk_blocks,
            fetched_tokens=stats.fetched_tokens,
            disk_problem=stats.disk_problem,
            disk_again_unix_s=pump.disk_again_unix_s(stats.disk_again_s),
            host_bound_blocks=stats.host_bound,
            host_problem=pump.host_problem,
            prompt_steps=_prompt_steps(pump.chunk),
            drafts=_drafts(self.base.drafts, pump.draft_stats()),
            preemptions=stats.preemptions,
            admitted_tokens=stats.admitted_tokens,
            cached_tokens=stats.cached_tokens,
            kept_tokens=self.base.kept_tokens + stats.kept_tokens,
            replayed_tokens=self.base.replayed_tokens + stats.replayed_tokens,
            tokens_per_s=pump.tokens.per_second(),
            expert_shares=pump.micro_batches.experts.shares() or self.base.expert_shares,
            stages=stages,
        )

    def note(self, **changes: Any) -> None:
        """Change noted facts without a report."""
        self.base = replace(self.base, **changes)

    def tell(self, run: EngineEpoch | None, **changes: Any) -> None:
        """Note the changes and report the state if it differs from the last report."""
        self.note(**changes)
        state = self.state(run)
        if state != self._last:
            self._last = state
            self._on_state(state)

    def opened(self, run: EngineEpoch) -> None:
        """Note an opened epoch: its context length and its stages' KV."""
        self.note(
            context_length=run.limits.max_tokens,
            stages=tuple(
                replace(stage, kv_bytes=site.kv_bytes(run.limits))
                for stage, site in zip(self.base.stages, run.sites, strict=True)
            ),
        )

    def closed(self, run: EngineEpoch) -> None:
        """Add an ended epoch's counts to the sums, and keep what it showed of the model."""
        stats = run.pump.stats()
        self.note(
            kept_tokens=self.base.kept_tokens + stats.kept_tokens,
            replayed_tokens=self.base.replayed_tokens + stats.replayed_tokens,
            expert_shares=run.pump.micro_batches.experts.shares() or self.base.expert_shares,
        )


def _drafts(known: DraftState | None, stats: DraftStats) -> DraftState | None:
    if known is None:
        return None
    return replace(
        known,
        windows=stats.windows,
        drafted=stats.drafted,
        accepted=stats.accepted,
        factor=round(stats.factor, 2),
        ahead=stats.ahead,
    )


def _prompt_steps(chunk: Chunk | None) -> PromptSteps | None:
    if chunk is None:
        return None
    return PromptSteps(
        in_flight=chunk.in_flight,
        num_tokens=chunk.step_tokens,
        ms=1e3 * chunk.seconds,
        bound=chunk.bound,
        over_goal_ms=1e3 * chunk.over_goal_s,
    )


def stage_state(site: StageSite) -> StageState:
    """Return the visible state of a prepared stage."""
    return StageState(
        node_id=site.node_id,
        node_name=site.node_name,
        backend=site.backend,
        device=site.device,
        slices=site.slices,
        address=site.address,
        weight_bytes=site.weight_bytes,
        ram_percent=site.ram_percent,
        products=site.products,
        slow_paths=site.slow_paths,
    )
