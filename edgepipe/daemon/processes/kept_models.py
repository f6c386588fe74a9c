"""Keeps the times of ``keep_alive`` on the disk, for a gateway or a node that starts again."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgepipe.cluster.private_files import read_private, write_private
from edgepipe.errors import ConfigInvalid
from edgepipe.ids import PipelineId
from edgepipe.wire.children import KeptModel, KeptModels

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20
_MOST_MODELS = 256
_WRITE_S = 1.0  # pause between two writes: gateways report each use of a model


class KeptModelsFile:
    """The newest report of this node's gateway: read at the start; ``run`` writes changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.newest = _read(path)
        self._changed = asyncio.Event()

    def keep(self, kept: KeptModels) -> None:
        """Keep a gateway's report."""
        self.newest = KeptModels(models=tuple(filter(_is_valid, kept.models[:_MOST_MODELS])))
        self._changed.set()

    async def run(self) -> None:
        """Write changes to the disk, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            document = [asdict(each) for each in self.newest.models]
            try:
                await asyncio.to_thread(write_private, self._path, json.dumps(document).encode())
            except OSError as exc:
                logger.warning("the times of keep_alive cannot be written: %s", exc)
            await asyncio.sleep(_WRITE_S)


def _is_valid(kept: KeptModel) -> bool:
    return all(math.isfinite(value) and value >= 0 for value in (kept.keep_s, kept.idle_since_s))


def _read(path: Path) -> KeptModels:
    """Read the file; models in an unusable file stay until a request says otherwise."""
    try:
        document: Any = json.loads(read_private(path, most_bytes=_MOST_BYTES))
        models = tuple(
            KeptModel(
                pipeline_id=PipelineId(str(each["pipeline_id"])),
                keep_s=float(each["keep_s"]),
                idle_since_s=float(each["idle_since_s"]),
            )
            for each in document[:_MOST_MODELS]
        )
        return KeptModels(models=tuple(filter(_is_valid, models)))
    except FileNotFoundError:
        return KeptModels()
    except (OSError, ValueError, TypeError, KeyError, ConfigInvalid) as exc:
        logger.warning("the times of keep_alive are forgotten: %s cannot be used: %s", path, exc)
        return KeptModels()
