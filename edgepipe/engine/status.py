"""What an engine tells of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edgepipe.engine.engine_epoch import EngineEpoch
from edgepipe.engine.sites import StageSite
from edgepipe.wire.engines import EngineState, StageState


class EngineStatus:
    """An engine's state as people see it: what was noted, and the numbers of the epoch that runs."""

    def __init__(self, base: EngineState, on_state: Callable[[EngineState], None]) -> None:
        """``on_state``: told at every change."""
        self.base = base
        self._on_state = on_state
        self._last: EngineState | None = None
        self._rows = 0.0  # of a micro-batch, when some sequence last ran

    def state(self, run: EngineEpoch | None) -> EngineState:
        """At this moment."""
        if run is None:
            return self.base
        pump, stats = run.pump, run.pump.stats()
        sizing = pump.micro_batches.sizing
        rows = stats.running / min(sizing.micro_batches, stats.running) if stats.running else 0.0
        self._rows = rows or self._rows  # a quiet ring shows what its last steps took
        decodes = [pump.micro_batches.decode_s(index, self._rows) for index in range(len(pump.meters))]
        stages = tuple(
            replace(meter.told(stage), decode_ms=1e3 * step_s, decode_upload_ms=1e3 * upload_s)
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
            preemptions=stats.preemptions,
            admitted_tokens=stats.admitted_tokens,
            cached_tokens=stats.cached_tokens,
            kept_tokens=self.base.kept_tokens + stats.kept_tokens,
            replayed_tokens=self.base.replayed_tokens + stats.replayed_tokens,
            tokens_per_s=pump.tokens.per_second(),
            stages=stages,
        )

    def note(self, **changes: Any) -> None:
        """Change what the next telling says."""
        self.base = replace(self.base, **changes)

    def tell(self, run: EngineEpoch | None, **changes: Any) -> None:
        """Note the changes, and tell if anything is different from before."""
        self.note(**changes)
        state = self.state(run)
        if state != self._last:
            self._last = state
            self._on_state(state)

    def opened(self, run: EngineEpoch) -> None:
        """An epoch stands: how long prompts may be, and what KV its stages hold."""
        self.note(
            context_length=run.limits.max_tokens,
            stages=tuple(
                replace(stage, kv_bytes=run.limits.num_blocks * site.kv_block_bytes)
                for stage, site in zip(self.base.stages, run.sites, strict=True)
            ),
        )

    def closed(self, run: EngineEpoch) -> None:
        """An epoch is over: its counts stay in the sums."""
        stats = run.pump.stats()
        self.note(
            kept_tokens=self.base.kept_tokens + stats.kept_tokens,
            replayed_tokens=self.base.replayed_tokens + stats.replayed_tokens,
        )


def stage_state(site: StageSite) -> StageState:
    """A prepared stage as people see it."""
    return StageState(
        node_id=site.node_id,
        node_name=site.node_name,
        backend=site.backend,
        device=site.device,
        slices=site.slices,
        address=site.address,
        weight_bytes=site.weight_bytes,
    )
