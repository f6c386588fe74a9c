"""Frames between a process and its kept child: u32 big-endian length, then so many bytes."""

from __future__ import annotations

import struct
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
