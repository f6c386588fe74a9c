"""Batches of this node's gateway, for the gateway of the node that keeps a copy of them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

from edgepipe.cluster.changes import Changes
from edgepipe.daemon.offers import PublishedState
from edgepipe.errors import AccessDenied, CapacityError
from edgepipe.plain_words import plain
from edgepipe.wire.batches import BatchFacts, BatchPart, BatchReport, BatchSource, ReadBatchRequest, digest_of
from edgepipe.wire.nodes import NodeState

logger = logging.getLogger(__name__)
PART_BYTES = 256 << 10
MOST_BYTES = 16 << 20  # bound on one answer: it ends within the caller's deadline on a slow link, and is durable there
NEWS_S = 20.0  # how long an answer waits for news
_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}")


class BatchSources:
    """The newest report of this node's gateway. Files only grow, so bytes up to a recorded size never change."""

    def __init__(self, folder: Path, *, local: PublishedState) -> None:
        """``folder``: holds the files of batches."""
        self._folder = folder
        self._local = local
        self._facts: BatchFacts | None = None
        self._sources: dict[str, BatchSource] = {}
        self._changes = Changes()

    def take(self, report: BatchReport) -> None:
        """Take a report of the gateway."""
        self._facts = report.facts
        self._sources = {source.batch_id: source for source in report.sources}
        self._changes.notify()
        self._local.refresh(urgent=False)

    def forget(self) -> None:
        """Take note that a new gateway has to report: what the last one said may be outdated."""
        self._facts = None
        self._local.refresh()

    def tell(self, state: NodeState) -> NodeState:
        """Set the state's field."""
        return replace(state, batches=self._facts)

    async def read(self, request: ReadBatchRequest, *, keeper: str | None) -> AsyncGenerator[BatchPart]:
        """Yield the record, then what the caller lacks of the files. Without news for a while, yield nothing.

        ``keeper``: the caller's node; None without encryption. Raises AccessDenied, also when the keeper changes.
        """
        source = await self._news(request, keeper)
        if source is None:
            return
        yield BatchPart(record=source.record)
        room = MOST_BYTES
        offsets = (request.input_at, request.output_at, request.error_at)
        for number, (name, at, size) in enumerate(zip(source.files, offsets, source.num_bytes, strict=True)):
            while at < size and room > 0:
                data = await asyncio.to_thread(self._bytes, name, at, min(PART_BYTES, size - at, room))
                if not data:
                    break  # its user has deleted the file
                yield BatchPart(file=number, offset=at, data=data)
                at += len(data)
                room -= len(data)

    async def _news(self, request: ReadBatchRequest, keeper: str | None) -> BatchSource | None:
        """Wait until the caller lacks something; return None after a while."""
        try:
            async with asyncio.timeout(NEWS_S):
                async for _ in self._changes.watch():
                    source = self._sources.get(request.batch_id)
                    if source is None or keeper not in (None, source.keeper):
                        raise AccessDenied("this node has no copy of that batch to give", fact=request.batch_id[:64])
                    if _lacks(request, source):
                        return source
        except TimeoutError:
            pass
        return None

    def _bytes(self, name: str, at: int, count: int) -> bytes:
        """Read from a file; empty if it is gone. Raises CapacityError."""
        if not _NAME.fullmatch(name):
            return b""
        try:
            with (self._folder / name).open("rb") as source:
                source.seek(at)
                return source.read(count)
        except FileNotFoundError:
            return b""
        except OSError as exc:
            raise CapacityError("a file of a batch cannot be read", fact=plain(exc)) from exc


def _lacks(request: ReadBatchRequest, source: BatchSource) -> bool:
    offsets = (request.input_at, request.output_at, request.error_at)
    return request.have != digest_of(source.record) or any(
        at < size for at, size in zip(offsets, source.num_bytes, strict=True)
    )
