"""Requests as the page draws them (PURE): where the time of each went. Their texts are not kept."""

from __future__ import annotations

from typing import Any

from edgepipe.gateway.request_ring import RequestRecord, RequestRing
from edgepipe.gateway.ui.topic import SLOW_S, Topic
from edgepipe.safe_text import one_line


class RequestsTopic(Topic):
    """Requests of one stream: an event has those that changed since the one before, newest first."""

    def __init__(self, ring: RequestRing) -> None:
        super().__init__("requests", self._take, every_s=SLOW_S)
        self._ring = ring
        self._known: dict[str, dict[str, Any]] = {}
        self._changed: dict[str, dict[str, Any]] = {}  # not sent yet

    def refresh(self) -> int:
        """Look for changed requests."""
        present = {record.request_id: request_json(record) for record in self._ring.records}
        changed = {key: row for key, row in present.items() if self._known.get(key) != row}
        if changed:
            self._changed = changed | {key: row for key, row in self._changed.items() if key not in changed}
            self.version += 1
        self._known = present
        return self.version

    def _take(self) -> list[dict[str, Any]]:
        rows, self._changed = list(self._changed.values()), {}
        return rows


def request_json(record: RequestRecord) -> dict[str, Any]:
    """Return one request. Phases that have not ended are null; ``itl_s`` is the mean time between tokens."""
    gaps = record.output_tokens - 1
    decoded_s = _between(record.first_s, record.last_s)
    return {
        "id": record.request_id,
        "model": one_line(record.model, most_chars=64),
        "state": record.state,
        "end": one_line(record.end, most_chars=64),
        "at_s": round(record.accepted_wall_s, 1),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "queue_s": _between(record.accepted_s, record.started_s),
        "prefill_s": _between(record.started_s, record.first_s),
        "decode_s": _between(record.first_s, record.ended_s),
        "whole_s": _between(record.accepted_s, record.ended_s),
        "recovery_s": round(record.recovery_s, 3),
        "recovering": record.recovering_since_s is not None,
        "itl_s": round(decoded_s / gaps, 5) if decoded_s is not None and gaps > 0 else None,
    }


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else round(max(0.0, end_s - begin_s), 3)
