"""Say once for each model what requests had changed or left out so that they could be answered."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_MAX_TOLD = 1024  # models times kinds that are remembered; when it is full, notes go to DEBUG only


@dataclass(frozen=True, slots=True)
class Note:
    """A change of a request that keeps its meaning."""

    kind: str
    text: str


class NoteLog:
    """Logs the first note of each kind for each model, and the others at DEBUG."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def tell(self, model: str, notes: Iterable[Note]) -> None:
        """Log the notes of a request."""
        for note in notes:
            is_new = (model, note.kind) not in self._told and len(self._told) < _MAX_TOLD
            if is_new:
                self._told.add((model, note.kind))
            logger.log(logging.INFO if is_new else logging.DEBUG, "%s model=%s", note.text, model)
