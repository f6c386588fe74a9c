"""The last addresses of members, kept on disk: this node finds them again where multicast does not pass."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgepipe.cluster.private_files import read_private, write_private
from edgepipe.cluster.trust_keeper import WRITE_AGAIN_S
from edgepipe.errors import ConfigInvalid

logger = logging.getLogger(__name__)

_MOST_BYTES = 64 << 10
_MOST_NODES = 256  # a home has a few dozen machines


class RememberedAddresses:
    """Node id to HOST:PORT. An entry may be old or wrong: the node that answers must prove its identity."""

    def __init__(self, path: Path, *, write_again_s: float = WRITE_AGAIN_S) -> None:
        """``write_again_s``: from a failed write to the next."""
        self._write_again_s = write_again_s
        self._path = path
        self._addresses = _read(path)
        self._changed = asyncio.Event()

    def all(self) -> Mapping[str, str]:
        """Return all addresses."""
        return dict(self._addresses)

    def note(self, node_id: str, address: str) -> None:
        """Keep the address that a member reports."""
        if address and self._addresses.get(node_id) != address:
            self._addresses.pop(node_id, None)
            self._addresses[node_id] = address
            while len(self._addresses) > _MOST_NODES:
                self._addresses.pop(next(iter(self._addresses)))
            self._changed.set()

    def forget(self, node_id: str) -> None:
        """Drop the address of a node that is no longer a member."""
        if self._addresses.pop(node_id, None) is not None:
            self._changed.set()

    async def run(self) -> None:
        """Write every change to the disk, until cancelled; retry what a full disk refused."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            data = json.dumps(self._addresses, indent=1).encode()
            try:
                await asyncio.to_thread(write_private, self._path, data)
            except OSError as exc:
                logger.warning("the members' addresses cannot be written: %s", exc)
                asyncio.get_running_loop().call_later(self._write_again_s, self._changed.set)


def _read(path: Path) -> dict[str, str]:
    """Read the addresses. A damaged file raises nothing, since members can be found in other ways."""
    try:
        document: Any = json.loads(read_private(path, most_bytes=_MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, ConfigInvalid) as exc:
        logger.warning("the members' addresses are forgotten: %s cannot be used: %s", path, exc)
        return {}
    if not isinstance(document, dict):
        return {}
    pairs: list[tuple[Any, Any]] = list(document.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType, reportUnknownVariableType]
    return {key: value for key, value in pairs[:_MOST_NODES] if _is_address(value)}


def _is_address(value: Any) -> bool:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 65536
