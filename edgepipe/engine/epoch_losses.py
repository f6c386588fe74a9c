"""What the end of an epoch means for requests and nodes: the step that broke, and what ended a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgepipe.engine.blame import Crash
from edgepipe.engine.engine_epoch import EngineEpoch
from edgepipe.engine.recovery_types import EpochEnded
from edgepipe.engine.sites import StageSite
from edgepipe.engine.table import RequestTable
from edgepipe.errors import EdgepipeError, StepFailed
from edgepipe.ids import SequenceId, StepId


class EpochLosses:
    """Charges crashes to the sequences of a step."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        # Counter of the newest epoch that ended, and its steps in flight at the end.
        self._newest: tuple[int, Mapping[StepId, tuple[SequenceId, ...]]] = (0, {})

    def note(self, run: EngineEpoch) -> None:
        """Keep the steps in flight of an epoch that has ended."""
        self._newest = (run.epoch.counter, run.pump.in_flight())

    def end(self, run: EngineEpoch, error: EdgepipeError) -> EpochEnded:
        """Return the end of an epoch for the recovery core."""
        broken = run.broken_step()
        crash = None
        if broken is not None:
            crash = self._crash(broken.site, broken.sequences, error, device_failed=broken.device_failed)
        missed = run.missed()
        return EpochEnded(
            epoch=run.epoch,
            error=error,
            crash=crash,
            node_id=run.ended_by(error) if not missed.links else None,  # a broken link is charged by itself
            missed=missed,
            progress=self._table.progress(),
        )

    def crashes(self, sites: Sequence[StageSite]) -> list[Crash]:
        """Return the steps of the last epoch that ended a process of these stages."""
        counter, steps = self._newest
        crashes: list[Crash] = []
        for site in sites:
            if site.crashed_in is not None and site.crashed_in[0] == counter:
                error = StepFailed(
                    f"{site.label} on {site.node_name} crashed",
                    fact=f"computing step {site.crashed_in[1]} ended its process",
                    next_step=f"see 'edgepipe logs' on {site.node_name}",
                    node=site.node_name,
                    stage=site.label,
                )
                crashes.append(self._crash(site, steps.get(site.crashed_in[1], ()), error, new_process=True))
        return crashes

    def _crash(
        self,
        site: StageSite,
        sequences: tuple[SequenceId, ...],
        error: EdgepipeError,
        *,
        device_failed: bool = False,
        new_process: bool = False,
    ) -> Crash:
        return Crash(
            node_id=site.node_id,
            sequences=sequences,
            requests=self._table.requests_of(sequences),
            error=error,
            device_failed=device_failed,
            new_process=new_process,
            guilty=self._table.is_guilty(sequences),
        )
