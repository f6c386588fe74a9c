"""The audit log of admissions, removals and refusals, as bounded lines of JSON in the node's data directory."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from edgepipe.safe_text import one_line

logger = logging.getLogger(__name__)

_FILE_BYTES = 1 << 20  # about 5,000 lines; one older file is kept, so 2 MB on disk
_TEXT_CHARS = 200  # longest text that a peer chooses
_REPEAT_S = 60.0  # a repeated event within this time is counted, not written
_MAX_REPEATS = 256  # remembered pairs of kind and peer; a peer that invents names only causes more lines


class AuditKind(StrEnum):
    """Kind of event."""

    FOUNDED = "founded"
    JOINED = "joined"
    PAIRED = "paired"
    PAIRING_FAILED = "pairing failed"
    ADDED = "added"
    REMOVED = "removed"
    PROMOTED = "promoted"
    DENIED = "denied"  # a call beyond the caller's role
    HANDSHAKE_REFUSED = "handshake refused"
    BAD_STATEMENT = "bad statement"  # a trust statement without a valid owner's signature
    STORE_DAMAGED = "store damaged"
    STORE_MENDED = "store mended"
    IDENTITY_COPIED = "identity copied"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One line of the log."""

    at_s: float  # seconds since 1970
    kind: str
    who: str  # node id, name or address
    detail: str = ""
    times: int = 1  # events since the last line of the same kind and peer


class AuditLog:
    """Appends entries to a file of bounded size. Thread-safe. Logs a full disk, never raises it."""

    def __init__(self, path: Path, wall_s: Callable[[], float]) -> None:
        self._path = path
        self._wall_s = wall_s
        self._lock = threading.Lock()
        self._recent: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()  # last line, events since

    def record(self, kind: AuditKind, *, who: str, detail: str = "") -> None:
        """Record an event. Repeats within a minute are only counted; the next line has the count."""
        now = self._wall_s()
        with self._lock:
            who, detail = one_line(who, most_chars=_TEXT_CHARS), one_line(detail, most_chars=_TEXT_CHARS)
            times = self._times(kind, who, now)
            if not times:
                return
            entry = AuditEntry(at_s=now, kind=kind, who=who, detail=detail, times=times)
            try:
                self._append(json.dumps(asdict(entry), ensure_ascii=True))
            except OSError as exc:
                logger.warning("the audit log cannot be written: %s", exc)

    def _times(self, kind: str, who: str, now: float) -> int:
        """Return the number of events for the line; 0: write no line."""
        key = (kind, who)
        written_s, held = self._recent.get(key, (float("-inf"), 0))
        if 0 <= now - written_s < _REPEAT_S:
            self._recent[key] = (written_s, held + 1)
            return 0
        self._recent[key] = (now, 0)
        self._recent.move_to_end(key)
        if len(self._recent) > _MAX_REPEATS:
            self._recent.popitem(last=False)
        return held + 1

    def _append(self, line: str) -> None:
        if self._path.exists() and self._path.stat().st_size >= _FILE_BYTES:
            self._path.replace(_older(self._path))
        with open(self._path, "a", encoding="ascii", opener=_private) as file:
            file.write(line + "\n")


def read_audit(path: Path, *, last: int) -> list[AuditEntry]:
    """Return the newest ``last`` entries, oldest first, without lines that a crash truncated."""
    lines: list[str] = []
    for file in (_older(path), path):
        try:
            lines += file.read_text(encoding="ascii", errors="replace").splitlines()
        except FileNotFoundError:
            continue
    entries = [entry for line in lines[-last:] if (entry := _entry(line)) is not None]
    return entries[-last:]


def _entry(line: str) -> AuditEntry | None:
    try:
        values: dict[str, Any] = json.loads(line)
        return AuditEntry(**values)
    except (ValueError, TypeError):
        return None


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
