"""Transport that closes only after the client had time to read a refusal (RFC 9112, 9.6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class LingeringTransport(asyncio.Transport):
    """Transport whose ``close`` lingers while the client still sends.

    A socket that is closed with unread data resets the connection, and the client loses the answer. A lingering
    transport sends the answer and its own end first. Then it drops what arrives, until the client ends, ``linger_s``
    is over or ``linger_bytes`` have come.
    """

    def __init__(
        self, transport: asyncio.Transport, *, sends_more: Callable[[], bool], linger_s: float, linger_bytes: int
    ) -> None:
        """``sends_more`` tells ``close`` whether the client has not sent all of its request."""
        super().__init__()
        self._transport = transport
        self._sends_more = sends_more
        self._linger_s = linger_s
        self._linger_bytes = linger_bytes
        self._left_bytes = linger_bytes
        self._num_ahead = 0  # bytes of the next write that are sent already
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def lingers(self) -> bool:
        """Whether the client's data is dropped until the connection ends."""
        return self._deadline is not None

    def close(self) -> None:
        """Close after what was written is sent; linger if the client still sends."""
        if self.lingers:
            return
        if self._sends_more() and not self._transport.is_closing():
            self.linger()
        else:
            self._transport.close()

    def linger(self) -> None:
        """Send what was written and the end, then drop what arrives, within the limits."""
        if self.is_closing():
            return
        self._deadline = asyncio.get_running_loop().call_later(self._linger_s, self.abort)
        try:
            self._transport.write_eof()
            self._transport.resume_reading()
        except OSError:  # the client has reset the connection
            self.abort()

    def drop(self, num_bytes: int) -> None:
        """Count data that is dropped. Abort beyond the limit."""
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            self.abort()

    def renew(self) -> None:
        """Begin to count for another request."""
        self._left_bytes = self._linger_bytes

    def lost(self) -> None:
        """Stop the deadline of a connection that has ended."""
        if self._deadline is not None:
            self._deadline.cancel()

    def abort(self) -> None:
        """Close at once and drop unsent data."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether nothing more can be written."""
        return self.lingers or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Write data, less what was written ahead, unless the transport lingers."""
        if not self.lingers:
            ahead, self._num_ahead = self._num_ahead, 0
            self._transport.write(memoryview(data)[ahead:] if ahead else data)

    def write_ahead(self, data: bytes) -> bool:
        """Send the next byte of how the next write begins. Return whether a byte was left of ``data``."""
        byte = data[self._num_ahead : self._num_ahead + 1]
        if not self.is_closing():
            self._transport.write(byte)
            self._num_ahead += len(byte)
        return bool(byte)

    def write_eof(self) -> None:
        """Send the end; the client may still send."""
        self._transport.write_eof()

    def pause_reading(self) -> None:
        """Leave data in the kernel, unless the transport lingers."""
        if not self.lingers:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a detail of the connection."""
        return self._transport.get_extra_info(name, default)
