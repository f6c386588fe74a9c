"""A file of KV that left host memory: encrypted with a key of this process, and without a name.

The file loses its name as soon as it is open. So the system frees it when the process ends, however it ends, and no
other program can open it. Each piece of a block has its own nonce, which stays in memory with the key. A piece that
was changed, or that lies in another place, fails its check (AES-GCM).
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PIECE_BYTES = 256 * 1024  # encrypted at once: 0.1 ms, in which no other thread of the interpreter may run
_TAG_BYTES = 16


class Damaged(Exception):
    """A copy in the file is not what was written there."""


class TierFile:
    """Places of several memory classes, one behind another. Not safe for several threads."""

    def __init__(self, folder: Path, place_bytes: Sequence[int], num_places: Sequence[int]) -> None:
        """``place_bytes``: of a place of each class. Raises OSError if the folder or the file cannot be made."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file, name = tempfile.mkstemp(dir=folder, prefix="kv-")  # 0600
        os.unlink(name)
        self._cipher = AESGCM(secrets.token_bytes(32))
        self._num_written = 0  # pieces, for their nonces
        self._nonces: dict[tuple[int, int], int] = {}  # nonce of the first piece at each class and place
        self._place_bytes = place_bytes
        sizes = [size + _num_pieces(size) * _TAG_BYTES for size in place_bytes]
        self._sizes = sizes  # bytes of one place with its tags, in each class
        self._touched: set[tuple[int, int]] = set()  # class and place of what the file holds, or has held
        self.num_bytes = 0  # bytes of disk that the file takes
        self._begins = [0, *accumulate(size * count for size, count in zip(sizes, num_places, strict=True))]

    def write(self, number: int, place: int, parts: Sequence[memoryview]) -> None:
        """Write a place of a class. Raises OSError; then nothing is there."""
        self._nonces.pop((number, place), None)
        if (number, place) not in self._touched:
            self._touched.add((number, place))
            self.num_bytes += self._sizes[number]
        first, offset = self._num_written, self._begins[number] + place * self._sizes[number]
        self._num_written += _num_pieces(self._place_bytes[number])
        for index, piece in enumerate(_pieces(parts)):
            sealed = self._cipher.encrypt(_nonce(first + index), piece, None)
            if os.pwrite(self._file, sealed, offset) != len(sealed):
                raise OSError(f"only a part of {len(sealed)} bytes was written")
            offset += len(sealed)
        self._nonces[number, place] = first

    def read(self, number: int, place: int) -> bytes | None:
        """Return the bytes of a place; None if nothing was written there. Raises Damaged, and OSError."""
        first = self._nonces.get((number, place))
        if first is None:
            return None
        offset, left = self._begins[number] + place * self._sizes[number], self._place_bytes[number]
        pieces: list[bytes] = []
        while left:
            size = min(left, PIECE_BYTES)
            sealed = os.pread(self._file, size + _TAG_BYTES, offset)
            try:
                pieces.append(self._cipher.decrypt(_nonce(first + len(pieces)), sealed, None))
            except (InvalidTag, ValueError) as exc:
                raise Damaged from exc
            offset, left = offset + len(sealed), left - size
        return b"".join(pieces)

    def forget(self) -> None:
        """Forget what was written."""
        self._nonces.clear()

    def close(self) -> None:
        """Give the disk's space back."""
        os.close(self._file)


def _num_pieces(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_BYTES)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _pieces(parts: Sequence[memoryview]) -> Iterator[bytes | bytearray]:
    """Cut the bytes of all parts, one behind another, into pieces."""
    piece = bytearray()
    for part in parts:
        begin = 0
        while begin < len(part):
            end = min(len(part), begin + PIECE_BYTES - len(piece))
            piece += part[begin:end]
            begin = end
            if len(piece) == PIECE_BYTES:
                yield piece
                piece = bytearray()
    if piece:
        yield piece
