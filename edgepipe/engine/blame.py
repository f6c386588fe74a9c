"""PURE: whether a step that could not be computed counts against its requests or against the stage.

A request breaks the steps that it is in, wherever it is. A broken device breaks steps of different requests. So the
requests that all failed steps of a stage have in common are suspects. If the steps have no request in common, the stage
is at fault. A stage whose device fails a test step of its own is at fault at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from edgepipe.errors import EdgepipeError
from edgepipe.ids import NodeId, RequestKey, SequenceId

_MOST_IN_A_ROW = 8  # crashes of one stage that are compared; a request is refused at the third
_FLAWED, _FLAWED_WITHIN_S = 3, 60.0  # so many crashes of different requests within so long, whatever works between


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """One step that a stage could not compute."""

    node_id: NodeId  # of the stage
    sequences: tuple[SequenceId, ...]  # in the step
    requests: frozenset[RequestKey]  # theirs, as far as they have not ended
    error: EdgepipeError
    device_failed: bool = False  # a test step of the stage's own failed, too
    new_process: bool = False  # the process ended by it
    guilty: bool = False  # its only sequence broke its third step by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from a crash."""

    accused: bool  # it counts against the step's requests
    acquitted: frozenset[RequestKey] = frozenset()  # earlier crashes of the stage count against these no more
    replace: bool = False  # the stage gets a new process
    leave_out: bool = False  # the device is avoided for a while


@dataclass(slots=True)
class _Record:
    """One node's crashes."""

    in_a_row: deque[frozenset[RequestKey]] = field(default_factory=lambda: deque(maxlen=_MOST_IN_A_ROW))
    lately: deque[tuple[float, frozenset[RequestKey]]] = field(default_factory=lambda: deque(maxlen=_FLAWED))
    replaced: bool = False  # since a step last retired

    def is_flawed(self, now_s: float) -> bool:
        """Whether the newest crashes came close together and have no request in common."""
        full = len(self.lately) == _FLAWED and now_s - self.lately[0][0] <= _FLAWED_WITHIN_S
        return full and not _common(requests for _, requests in self.lately)

    def requests(self) -> frozenset[RequestKey]:
        """All that were in the crashes that are remembered."""
        return frozenset[RequestKey]().union(*self.in_a_row, *(requests for _, requests in self.lately))


class Blame:
    """Compares the crashes of each node's stages."""

    def __init__(self) -> None:
        self._records: dict[NodeId, _Record] = {}

    def judge(self, crash: Crash, now_s: float) -> Verdict:
        """Say what a crash at ``now_s`` (monotonic) counts against."""
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
        """Note that a step has retired: every stage of the pipeline computes."""
        for record in self._records.values():
            record.in_a_row.clear()
            record.replaced = False


def _common(crashes: Iterable[frozenset[RequestKey]]) -> frozenset[RequestKey]:
    """The requests that were in all of these steps."""
    first, *others = crashes
    return first.intersection(*others)
