"""Reads ``multipart/form-data`` piece by piece, RFC 7578. PURE."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_MAX_HEADER_BYTES = 8 << 10  # header of one part
_MAX_PARTS = 32
_PARAMETER = re.compile(r';\s*([A-Za-z0-9_*-]+)=(?:"((?:[^"\\]|\\.)*)"|([^;\s]*))')


class MultipartInvalid(Exception):
    """The body is no valid form. The text says why."""


@dataclass(frozen=True, slots=True)
class PartBegins:
    """A field of the form begins."""

    name: str
    filename: str | None  # None: a field without a file


@dataclass(frozen=True, slots=True)
class PartData:
    """Some bytes of the field that began last."""

    data: bytes


PartEvent = PartBegins | PartData


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a Content-Type names. Raises MultipartInvalid."""
    kind, _, _ = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise MultipartInvalid("send the file as multipart/form-data")
    boundary = _parameters(content_type).get("boundary", "")
    if not 0 < len(boundary) <= 70:
        raise MultipartInvalid("Content-Type needs a boundary of 1 to 70 characters")
    return boundary.encode("latin-1", "replace")


class MultipartReader:
    """Turns chunks of a body into events. It holds no more than a part's header, or a boundary's length of data."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._held = b"\r\n"  # the first boundary needs no line break before it
        self._state = "preamble"  # | "boundary" | "header" | "data" | "end"
        self._num_parts = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last boundary has come."""
        return self._state == "end"

    def push(self, chunk: bytes) -> Iterator[PartEvent]:
        """Yield what the chunk adds. Raises MultipartInvalid."""
        self._held += chunk
        while (event := self._next()) is not None:
            if event:
                yield event[0]

    def _next(self) -> tuple[PartEvent, ...] | None:
        """Do one step. Return its event, an empty tuple without one, or None if more bytes are needed."""
        if self._state in ("preamble", "data"):
            return self._data()
        if self._state == "boundary":
            return self._after_boundary()
        if self._state == "header":
            return self._header()
        self._held = b""
        return None

    def _data(self) -> tuple[PartEvent, ...] | None:
        at = self._held.find(self._delimiter)
        if at < 0:
            at = max(0, len(self._held) - len(self._delimiter) + 1)  # the rest may begin a boundary
            if not at:
                return None
            data, self._held = self._held[:at], self._held[at:]
        else:
            data, self._held = self._held[:at], self._held[at + len(self._delimiter) :]
            before, self._state = self._state, "boundary"
            return (PartData(data),) if data and before == "data" else ()
        return (PartData(data),) if self._state == "data" else ()

    def _after_boundary(self) -> tuple[PartEvent, ...] | None:
        if len(self._held) < 2:
            return None
        if self._held.startswith(b"--"):
            self._state = "end"
            return ()
        line, found, rest = self._held.partition(b"\r\n")
        if line.strip(b" \t") or (not found and len(line) > 64):
            raise MultipartInvalid("a boundary is followed by other bytes than a line break")
        if not found:
            return None
        self._held, self._state = b"\r\n" + rest, "header"  # a part may have no header at all
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise MultipartInvalid(f"the form has more than {_MAX_PARTS} fields")
        return ()

    def _header(self) -> tuple[PartEvent, ...] | None:
        at = self._held.find(b"\r\n\r\n")
        if at < 0 and len(self._held) <= _MAX_HEADER_BYTES:
            return None
        if at < 0 or at > _MAX_HEADER_BYTES:
            raise MultipartInvalid(f"the header of a field is longer than {_MAX_HEADER_BYTES >> 10} KiB")
        header, self._held = self._held[:at].decode("utf-8", "replace"), self._held[at + 4 :]
        self._state = "data"
        for line in header.split("\r\n"):
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition":
                found = _parameters(value)
                return (PartBegins(found.get("name", ""), found.get("filename")),)
        raise MultipartInvalid("a field has no Content-Disposition")


def _parameters(value: str) -> dict[str, str]:
    """Return the parameters of a header's value, names in lower case."""
    return {
        match[1].lower(): re.sub(r"\\(.)", r"\1", match[2]) if match[3] is None else match[3]
        for match in _PARAMETER.finditer(value)
    }
