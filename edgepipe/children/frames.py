"""Frames between a process and its warm child: u32 big-endian length, then that many bytes."""

from __future__ import annotations

import signal
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import IO

HEAD = struct.Struct(">I")


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read the next frame; None at the end."""
    head = stream.read(HEAD.size)
    return stream.read(HEAD.unpack(head)[0]) if head else None


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Write one frame."""
    stream.write(HEAD.pack(len(data)))
    stream.write(data)
    stream.flush()


def answer_frames(answer: Callable[[bytes], bytes]) -> None:
    """Run the loop of a child (``WarmChild``): report ready, then answer every frame until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    source, target = sys.stdin.buffer, sys.stdout.buffer
    write_frame(target, b"ready")
    while (question := read_frame(source)) is not None:
        write_frame(target, answer(question))


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids as a count and 32-bit numbers: a million take milliseconds, as JSON 0.1 s."""
    return HEAD.pack(len(ids)) + array("I", ids).tobytes()


def unpack_ids(data: bytes | memoryview, at: int) -> tuple[list[int], int]:
    """Return the packed ids and the position after them."""
    (count,) = HEAD.unpack_from(data, at)
    start = at + HEAD.size
    end = start + count * array("I").itemsize
    return array("I", bytes(data[start:end])).tolist(), end
