"""The newest requests of this gateway and where their time went (PURE). Nothing of their texts is kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from edgepipe.errors import ClusterError, EdgepipeError, RequestInvalid

MOST_REQUESTS = 200
Cancel = Callable[[EdgepipeError], None]


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request. Times are monotonic seconds; None: not reached."""

    request_id: str
    model: str
    prompt_tokens: int
    accepted_wall_s: float
    accepted_s: float
    cancel: Cancel
    output_tokens: int = 0
    started_s: float | None = None  # it went to the engine
    first_s: float | None = None  # its first token came
    last_s: float | None = None  # its newest token came
    ended_s: float | None = None
    end: str = ""  # empty while it runs; else the reason of its end, or the code of its error
    failed: bool = False
    recovering_since_s: float | None = None
    recovery_s: float = 0.0  # its model's stages were replaced

    @property
    def state(self) -> str:
        """queue | prefill | decode | done | failed"""
        if self.ended_s is not None:
            return "failed" if self.failed else "done"
        if self.first_s is not None:
            return "decode"
        return "prefill" if self.started_s is not None else "queue"


class RequestRing:
    """Records of the newest requests, oldest first. ``version`` grows with every change that people see at once."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self.version = 0

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """All records, newest first."""
        return tuple(reversed(self._records.values()))

    def add(self, record: RequestRecord) -> None:
        """Add a request that was accepted."""
        self._records[record.request_id] = record
        if len(self._records) > MOST_REQUESTS:
            self._drop_one()
        self.version += 1

    def changed(self) -> None:
        """Note that a record has changed."""
        self.version += 1

    def recovering(self, model: str, *, is_so: bool, now_s: float) -> None:
        """Count recovery of a model's running requests from now on, or until now."""
        for record in self._records.values():
            if record.model != model or record.ended_s is not None:
                continue
            if is_so and record.recovering_since_s is None:
                record.recovering_since_s = now_s
            elif not is_so and record.recovering_since_s is not None:
                record.recovery_s += now_s - record.recovering_since_s
                record.recovering_since_s = None

    def cancel(self, request_id: str) -> None:
        """End a request with an error. Raises RequestInvalid if it does not run."""
        record = self._records.get(request_id)
        if record is None or record.ended_s is not None:
            raise RequestInvalid("this request does not run any more", next_step="see the newest requests")
        record.cancel(ClusterError("the request was cancelled on this node's page"))

    def _drop_one(self) -> None:
        """Drop the oldest record that has ended, else the oldest."""
        oldest = next((key for key, each in self._records.items() if each.ended_s is not None), None)
        del self._records[oldest or next(iter(self._records))]
