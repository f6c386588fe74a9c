"""PURE: decide whether a crashed step counts against its requests or against the stage.

A bad request breaks its steps on any stage. A broken device breaks steps of different requests. So the requests common
to all crashed steps of a stage are suspects. If the steps have no common request, the stage is at fault. A stage whose
device fails its own test step is at fault at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from edgepipe.engine.settings import CRASHES_COMPARED, FLAWED_CRASHES, FLAWED_WITHIN_S
from edgepipe.errors import EdgepipeError
from edgepipe.ids import NodeId, RequestKey, SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """One step that a stage could not compute."""

    node_id: NodeId  # node of the crashed stage
    sequences: tuple[SequenceId, ...]  # sequences in the step
    requests: frozenset[RequestKey]  # requests of those sequences, unless already ended
    error: EdgepipeError
    device_failed: bool = False  # the stage's own test step failed, too
    new_process: bool = False  # the stage's process ended
    guilty: bool = False  # it is the third crash of the step's only sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Consequences of a crash."""

    accused: bool  # the crash counts against the step's requests
    acquitted: frozenset[RequestKey] = frozenset()  # requests for which earlier crashes of the stage no longer count
    replace: bool = False  # the stage gets a new process
    leave_out: bool = False  # the device is quarantined


@dataclass(slots=True)
class _Record:
    """Crashes of one node."""

    in_a_row: deque[frozenset[RequestKey]] = field(default_factory=lambda: deque(maxlen=CRASHES_COMPARED))
    lately: deque[tuple[float, frozenset[RequestKey]]] = field(default_factory=lambda: deque(maxlen=FLAWED_CRASHES))
    replaced: bool = False  # its process was replaced since a sequence last got further

    def is_flawed(self, now_s: float) -> bool:
        """Return whether the newest crashes came close together and have no common request."""
        full = len(self.lately) == FLAWED_CRASHES and now_s - self.lately[0][0] <= FLAWED_WITHIN_S
        return full and not _common(requests for _, requests in self.lately)

    def requests(self) -> frozenset[RequestKey]:
        """Return the requests of all remembered crashes."""
        return frozenset[RequestKey]().union(*self.in_a_row, *(requests for _, requests in self.lately))


class Blame:
    """Compares the crashes of each node."""

    def __init__(self) -> None:
        self._records: dict[NodeId, _Record] = {}

    def judge(self, crash: Crash, now_s: float) -> Verdict:
        """Judge a crash at ``now_s`` (monotonic)."""
        record = self._records.setdefault(crash.node_id, _Record())
        record.in_a_row.append(crash.requests)
        record.lately.append((now_s, crash.requests))
        again = len(record.in_a_row) > 1
        flawed = record.is_flawed(now_s)
        at_fault = crash.device_failed or flawed or (again and not _common(record.in_a_row))
        replaced_before = record.replaced
        record.replaced = replaced_before or at_fault or again or crash.new_process
        if not at_fault:
            return Verdict(accused=True, replace=record.replaced and not (replaced_before or crash.new_process))
        return Verdict(
            accused=False,
            acquitted=record.requests(),
            replace=not crash.new_process,
            leave_out=replaced_before or flawed,
        )

    def worked(self) -> None:
        """Clear the counts because a sequence got further: every stage of the pipeline computes."""
        for record in self._records.values():
            record.in_a_row.clear()
            record.replaced = False


def _common(crashes: Iterable[frozenset[RequestKey]]) -> frozenset[RequestKey]:
    """Return the requests common to all crashed steps."""
    first, *others = crashes
    return first.intersection(*others)
