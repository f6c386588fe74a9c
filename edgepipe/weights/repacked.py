"""Where a backend may keep a stored model's weights in its own layout.

The folder belongs to this node alone: no manifest lists it, no peer reads it, and it goes with the model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

REPACKED_FOLDER = "repacked"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackedPlace:
    """A folder for repacked weights, and what they were made of."""

    folder: Path  # may be missing; its parent exists
    source: str  # identifies the content of the model's files
    model_bytes: int  # bytes of the model's tensors on this disk


@runtime_checkable
class KeepsRepacked(Protocol):
    """A ``WeightSource`` beside whose files repacked weights may be kept."""

    @property
    def repacked(self) -> RepackedPlace | None:
        """The place; None for a file outside the store, and in a folder that cannot be written."""
        ...


def files_identity(paths: Iterable[Path]) -> str:
    """Return a digest of the files' names, sizes and times of change. Raises OSError."""
    stats = [(path.name, path.stat()) for path in sorted(paths)]
    return hashlib.sha256(
        json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]).encode()
    ).hexdigest()


def repacked_place(folder: Path, *, source: str, model_bytes: int) -> RepackedPlace | None:
    """Return the place in a stored model's folder; None if the folder cannot be written."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    return RepackedPlace(folder=folder / REPACKED_FOLDER, source=source, model_bytes=model_bytes)
