"""Repacked weights on disk, beside the model: a later load reads them instead of repacking.

Each weight is one file::

    {"key": ..., "rows": ..., ...}\\n     header, JSON
    low, high, scale, offset, order, factors
    digest                              BLAKE2b of the sums of all pieces of 1 MB

The digest finds files that a crash cut short or a disk damaged. A file that another user may change is not used.
Nothing is mapped: a mapped file that shrinks kills the process. A file or folder that cannot be used costs only time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from edgepipe.own_files import refusal
from edgepipe.spec.tensors import TensorInfo, WeightInfo
from edgepipe.weights.repacked import RepackedPlace
from edgepipe_torch.cpu.kinds import Kind
from edgepipe_torch.cpu.layout import LAYOUT_VERSION
from edgepipe_torch.cpu.product_code import PANEL_INPUTS
from edgepipe_torch.cpu.tiled_weight import TiledWeight, on_threads
from edgepipe_torch.cpu.weight_memory import WeightMemory

logger = logging.getLogger(__name__)

SUFFIX = ".repacked"
# All files may take this multiple of the model's bytes. Q4_K needs 1.11; types of 2 bits need more.
MOST_SHARE = 1.25
LEAST_FREE_SHARE = 2.0  # multiple of the model's bytes that stays free on the disk
_PART = ".part"  # suffix of a file that is not complete
_LOST_PART_S = 3600.0  # age of a part whose process died: others write on
_NICENESS = 19  # niceness of the writing thread, where threads have one
_PIECE_BYTES = 1 << 20  # read and summed at once: stays in a core's cache
_HEADER_BYTES = 1024  # longest header
_DIGEST_BYTES = 32

Bytes = npt.NDArray[np.uint8]


class ShardCache:
    """The repacked weights of one model, for one load.

    They are written after the load, while the model already computes, by a thread that leaves the processors to others.
    They are memory of the model, so waiting for the disk costs none. Files that ``stop`` cuts short are left to a later
    load.
    """

    def __init__(self, place: RepackedPlace, memory: WeightMemory | None = None) -> None:
        """``memory``: of weights that are read; None for torch's."""
        self._place = place
        self._memory = memory
        self._used: set[str] = set()  # names of files of this load
        self._kept: deque[tuple[str, TiledWeight]] = deque()
        self._writer: threading.Thread | None = None
        self._stopped = threading.Event()

    def read(self, info: TensorInfo | WeightInfo, order: npt.NDArray[np.int64] | None) -> TiledWeight | None:
        """Return a kept weight, or None. ``order``: rows of the outputs [O]; None: as they are."""
        key = self._key(info, order)
        self._used.add(_file_name(key))
        try:
            return _read(self._place.folder / _file_name(key), key, (info.shape[0], info.shape[1]), self._memory)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as exc:
            logger.info("the repacked copy of '%s' is not used: %s", info.name, exc)
            return None

    def keep(self, info: TensorInfo | WeightInfo, order: npt.NDArray[np.int64] | None, weight: TiledWeight) -> None:
        """Note a weight to be written. It must not change before ``stop``."""
        self._kept.append((self._key(info, order), weight))

    def write_in_background(self) -> None:
        """Begin to write the noted weights; the load is over."""
        if self._kept:
            self._writer = threading.Thread(target=self._write_all, name="keep repacked", daemon=True)
            self._writer.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until all is written. Raises TimeoutError."""
        if self._writer is not None:
            self._writer.join(timeout_s)
            if self._writer.is_alive():
                raise TimeoutError(f"repacked weights are not written after {timeout_s:g} s")

    def stop(self) -> None:
        """Stop writing and forget the weights, which the model is about to free."""
        self._stopped.set()
        if self._writer is not None:
            self._writer.join()
        self._kept.clear()

    def _key(self, info: TensorInfo | WeightInfo, order: npt.NDArray[np.int64] | None) -> str:
        rows = "" if order is None else hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()
        values = [LAYOUT_VERSION, self._place.source, info.name, info.scheme, info.num_bytes, list(info.shape), rows]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    def _write_all(self) -> None:
        """Write the noted weights until the end or the first failure."""
        _leave_processors_to_others()
        try:
            _remove_lost_parts(self._place.folder)
            with suppress(_Stopped):
                while self._kept:
                    self._write(*self._kept.popleft())
        except OSError as exc:  # such as a full disk or a folder of another user: the next load repacks
            logger.info("repacked weights are not kept: %s", exc)
        finally:
            self._kept.clear()

    def _write(self, key: str, weight: TiledWeight) -> None:
        folder = self._place.folder
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)  # parents are not made: a model that was removed meanwhile must not come back
        header, arrays = _header(key, weight), _arrays(weight)
        if not self._make_room(_file_name(key), _length(header, arrays)):
            return
        part = folder / f"{_file_name(key)}.{secrets.token_hex(4)}{_PART}"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                _write_bytes(file.fileno(), header)
                sums: list[int] = []
                for piece in _pieces(arrays):
                    if self._stopped.is_set():
                        raise _Stopped
                    sums.append(_sum(piece))
                    _write_bytes(file.fileno(), piece.data)
                _write_bytes(file.fileno(), _digest(sums))
            part.replace(folder / _file_name(key))
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    def _make_room(self, name: str, num_bytes: int) -> bool:
        """Remove files of other loads, the oldest first, until a file fits. Return whether it does."""
        folder, limit = self._place.folder, MOST_SHARE * self._place.model_bytes
        found = {path.name: path.lstat() for path in folder.iterdir()}
        total = sum(stat.st_size for other, stat in found.items() if other != name) + num_bytes
        others = sorted((stat.st_mtime_ns, other, stat.st_size) for other, stat in found.items())
        for _time, other, size in others:
            if total > limit and other not in (name, *self._used):
                (folder / other).unlink(missing_ok=True)
                total -= size
        free = shutil.disk_usage(folder).free
        return total <= limit and free - num_bytes >= LEAST_FREE_SHARE * self._place.model_bytes


class _Stopped(Exception):
    """The model is about to be freed."""


def _leave_processors_to_others() -> None:
    """Let the calling thread run only where a processor idles. Linux alone has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _remove_lost_parts(folder: Path) -> None:
    """Remove what a process that died did not complete."""
    for part in folder.glob(f"*{_PART}"):
        with suppress(OSError):
            if time.time() - part.lstat().st_mtime > _LOST_PART_S:
                part.unlink()


def _file_name(key: str) -> str:
    return f"{key[:32]}{SUFFIX}"


def _header(key: str, weight: TiledWeight) -> bytes:
    rows, inputs = weight.shape
    kind = weight.kind
    values = {
        "key": key,
        "rows": rows,
        "inputs": inputs,
        "group": weight.group,
        "zero": weight.zero,
        "bits": kind.bits,
        "added": kind.added,
        "floats": kind.floats,
        "e2m1": kind.e2m1,
        "ordered": weight.order is not None,
    }
    return json.dumps(values).encode() + b"\n"


def _read(path: Path, key: str, shape: tuple[int, int], memory: WeightMemory | None) -> TiledWeight:
    """Read a file into a new weight. Raises OSError, and ValueError for a file that was not written for this key."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        header, newline, _rest = file.read(_HEADER_BYTES).partition(b"\n")
        weight = _empty(json.loads(header), key, shape, memory)
        if reason := refusal(os.fstat(file.fileno())):
            raise ValueError(reason)
        arrays, start = _arrays(weight), len(header) + len(newline)
        if os.fstat(file.fileno()).st_size != _length(header + newline, arrays):
            raise ValueError("its length is wrong")
        if _read_arrays(file.fileno(), start, arrays) != _digest_at(file.fileno(), start, arrays):
            raise ValueError("its digest is wrong")
    return weight


def _empty(header: object, key: str, shape: tuple[int, int], memory: WeightMemory | None) -> TiledWeight:
    """Allocate the weight that a header describes. Raises ValueError if it is not the weight of this key and shape."""
    found = cast("Mapping[str, object]", header) if isinstance(header, dict) else {}
    numbers = [found.get(name) for name in ("rows", "inputs", "group", "zero", "bits")]
    flags = [found.get(name) for name in ("added", "floats", "e2m1", "ordered")]
    if found.get("key") != key or not all(type(number) is int for number in numbers):
        raise ValueError("its header is wrong")
    rows, inputs, group, zero, bits = cast("list[int]", numbers)
    sized = (rows, inputs) == shape and 0 < group <= PANEL_INPUTS and inputs % group == 0 and group % 8 == 0
    if not sized or bits not in (4, 5, 6, 8) or not all(type(flag) is bool for flag in flags):
        raise ValueError("its header is wrong")
    added, floats, e2m1, ordered = cast("list[bool]", flags)
    kind = Kind(bits=bits, added=added, floats=floats, e2m1=e2m1)
    order = np.empty(inputs, np.int32) if ordered else None
    return TiledWeight(shape, group=group, kind=kind, zero=zero, order=order, memory=memory)


def _arrays(weight: TiledWeight) -> list[Bytes]:
    """Return the weight's arrays as bytes that share its memory, in the order of the file."""
    tensors = (weight.low, weight.high, weight.scale, weight.offset, weight.order)
    found = [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors if tensor is not None]
    return [*found, weight.factors.view(np.uint8)]


def _pieces(arrays: Sequence[Bytes]) -> list[Bytes]:
    return [array[start : start + _PIECE_BYTES] for array in arrays for start in range(0, array.nbytes, _PIECE_BYTES)]


def _length(header: bytes, arrays: Sequence[Bytes]) -> int:
    return len(header) + sum(array.nbytes for array in arrays) + _DIGEST_BYTES


def _read_arrays(descriptor: int, start: int, arrays: Sequence[Bytes]) -> bytes:
    """Read the arrays on torch's threads; return their digest. Raises OSError, ValueError for too short a file."""
    pieces = _pieces(arrays)
    places = np.cumsum([start, *(piece.nbytes for piece in pieces)]).tolist()
    sums = [0] * len(pieces)
    step = max(1, -(-len(pieces) // torch.get_num_threads()))

    def read(first: int) -> None:
        for index in range(first, min(first + step, len(pieces))):
            if os.preadv(descriptor, [pieces[index].data], places[index]) != pieces[index].nbytes:
                raise ValueError("it is too short")
            sums[index] = _sum(pieces[index])

    on_threads(read, range(0, len(pieces), step))
    return _digest(sums)


def _digest_at(descriptor: int, start: int, arrays: Sequence[Bytes]) -> bytes:
    return os.pread(descriptor, _DIGEST_BYTES, start + sum(array.nbytes for array in arrays))


def _sum(piece: Bytes) -> int:
    """Return the sum of a piece's 64-bit words, modulo 2**64. All arrays have whole words."""
    return int(piece.view(np.uint64).sum(dtype=np.uint64))


def _digest(sums: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.array(sums, "<u8").tobytes(), digest_size=_DIGEST_BYTES).digest()


def _write_bytes(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
