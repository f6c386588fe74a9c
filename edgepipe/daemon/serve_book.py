"""What the cluster serves, as every node keeps it on its disk: what is served goes on after any machine, or all, were
off; what was stopped stays stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from google.protobuf.message import DecodeError

from edgepipe.cluster.private_files import read_private, write_private
from edgepipe.errors import ConfigInvalid
from edgepipe.wire.v1 import node_pb2 as pb

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20
_MOST_RECORDS = 64  # models, the stopped ones among them; the oldest of those are forgotten first


class ServeBook:
    """One record per model; of two, the one with the higher version counts."""

    def __init__(self, path: Path, *, on_change: Callable[[], None]) -> None:
        self._path = path
        self._on_change = on_change
        self._records = {record.spec.model: record for record in _read(path)}
        self._changed = asyncio.Event()

    def records(self) -> list[pb.ServeRecord]:
        """All of them, to be told to others."""
        return list(self._records.values())

    def served(self) -> list[pb.ServeRecord]:
        """Models that somebody wants served."""
        return [record for record in self._records.values() if not record.stopped]

    def note_served(self, pipeline_id: str, spec: pb.ServeSpec, *, engine_node: str) -> None:
        """An engine on ``engine_node`` serves it so."""
        known = self._records.get(spec.model)
        fresh = pb.ServeRecord(pipeline_id=pipeline_id, spec=spec, engine_node=engine_node)
        if known is not None:
            fresh.version = known.version
            if fresh == known:
                return
        fresh.version += 1
        self._put(fresh)

    def note_stopped(self, model: str) -> None:
        """Nobody wants it served any more."""
        known = self._records.get(model)
        if known is not None and not known.stopped:
            fresh = pb.ServeRecord()
            fresh.CopyFrom(known)
            fresh.stopped, fresh.version = True, known.version + 1
            self._put(fresh)

    def merge(self, records: Iterable[pb.ServeRecord]) -> None:
        """What another node keeps."""
        for record in records:
            known = self._records.get(record.spec.model)
            if known is None or _order(record) > _order(known):
                self._put(record)

    async def run(self) -> None:
        """Write every change down, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            data = pb.ServeRecords(records=self.records()).SerializeToString()
            try:
                await asyncio.to_thread(write_private, self._path, data)
            except OSError as exc:
                logger.error("what is served was not written down: %s", exc)

    def _put(self, record: pb.ServeRecord) -> None:
        self._records.pop(record.spec.model, None)
        self._records[record.spec.model] = record
        stopped = [model for model, one in self._records.items() if one.stopped]
        for model in stopped[: max(0, len(self._records) - _MOST_RECORDS)]:
            del self._records[model]
        self._changed.set()
        self._on_change()


def _order(record: pb.ServeRecord) -> tuple[int, bool, str, str]:
    """Two sides of a partition may count alike: a stop wins, then any order that is the same everywhere."""
    return record.version, record.stopped, record.pipeline_id, record.engine_node


def _read(path: Path) -> list[pb.ServeRecord]:
    try:
        return list(pb.ServeRecords.FromString(read_private(path, most_bytes=_MOST_BYTES)).records)
    except FileNotFoundError:
        return []
    except (ConfigInvalid, DecodeError) as exc:
        logger.warning("what was served is not known any more: %s", exc)
        return []
