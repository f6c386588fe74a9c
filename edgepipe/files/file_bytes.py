"""Positioned reads. Files are never mapped: if a mapped file shrinks, SIGBUS kills the process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.plain_words import plain

_CALL_BYTES = 1 << 30  # one system call reads less than 2 GiB


def read_at(path: Path, offset: int, num_bytes: int, *, what: str) -> npt.NDArray[np.uint8]:
    """Read ``num_bytes`` from ``offset`` into a new array. Raises ModelInvalid if the file is too short."""
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < offset + num_bytes:
                raise _too_short(path, what, offset + num_bytes)
            data = np.empty(num_bytes, np.uint8)
            _fill(file.fileno(), data.data, offset, path, what)
            return data
    except OSError as exc:
        raise ModelInvalid(f"'{path.name}' cannot be read", fact=plain(exc)) from exc


def _fill(descriptor: int, target: memoryview, offset: int, path: Path, what: str) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done : done + _CALL_BYTES]], offset + done)
        if count == 0:
            raise _too_short(path, what, offset + len(target))
        done += count


def _too_short(path: Path, what: str, needed: int) -> ModelInvalid:
    return ModelInvalid(
        f"'{path.name}' is shorter than its header says",
        fact=f"{what} ends at byte {needed}, beyond the end of the file",
        next_step="fetch the model again: edgepipe models pull MODEL",
    )
