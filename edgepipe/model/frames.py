"""Frames between a process and its kept child: u32 big-endian length, then so many bytes."""

from __future__ import annotations

import signal
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import BinaryIO

HEAD = struct.Struct(">I")


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = stream.read(HEAD.size)
    return stream.read(HEAD.unpack(head)[0]) if head else None


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """Send one."""
    stream.write(HEAD.pack(len(data)))
    stream.write(data)
    stream.flush()


def answer_frames(answer: Callable[[bytes], bytes]) -> None:
    """The life of a kept child (``WarmChild``): say that it is ready, then answer every frame until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    source, target = sys.stdin.buffer, sys.stdout.buffer
    write_frame(target, b"ready")
    while (question := read_frame(source)) is not None:
        write_frame(target, answer(question))


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as 32-bit numbers behind their count: a million take milliseconds, as JSON a tenth of a second."""
    return HEAD.pack(len(ids)) + array("I", ids).tobytes()


def unpack_ids(data: bytes | memoryview, at: int) -> tuple[list[int], int]:
    """The ids that were packed, and where they end."""
    (count,) = HEAD.unpack_from(data, at)
    start = at + HEAD.size
    end = start + count * array("I").itemsize
    return array("I", bytes(data[start:end])).tolist(), end
