"""Measured times of layers, kept on disk: a device is measured once per shape."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgepipe import __version__
from edgepipe.cluster.private_files import read_private, write_private
from edgepipe.errors import ConfigInvalid
from edgepipe.files.strict_json import parse_json_object
from edgepipe.planner.layer_profile import LayerProfile, Point

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20
_MOST_SHAPES = 128


def profile_key(*facts: object, model_config: str, model_weights: str = "") -> str:
    """Return a key of all that a layer's times depend on: device, compute settings, the layer's shape and format, our
    version.

    Raises ModelInvalid.
    """
    shape = parse_json_object(model_config.encode(), what="the model's shape")
    for name in ("eos_token_ids", "bos_token_id", "context_length"):
        shape.pop(name, None)
    known = [__version__, [_plain(fact) for fact in facts], shape]
    if model_weights:
        known.append(parse_json_object(model_weights.encode(), what="the model's weights"))
    text = json.dumps(known, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: object) -> object:
    return sorted(value.items()) if isinstance(value, Mapping) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType, reportUnknownVariableType]


class LayerProfiles:
    """Layers' times: read at the start; ``run`` writes additions."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _read(path)
        self._changed = asyncio.Event()

    def get(self, key: str) -> LayerProfile | None:
        """Return an earlier measurement of any age."""
        return self._known.get(key)

    def keep(self, key: str, profile: LayerProfile) -> None:
        """Keep a measurement; drop the oldest beyond ``_MOST_SHAPES``."""
        self._known.pop(key, None)
        self._known[key] = profile
        while len(self._known) > _MOST_SHAPES:
            self._known.pop(next(iter(self._known)))
        self._changed.set()

    async def run(self) -> None:
        """Write every change to the disk, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            document = {key: asdict(value) for key, value in self._known.items()}
            try:
                await asyncio.to_thread(write_private, self._path, json.dumps(document).encode())
            except OSError as exc:
                logger.warning("measured layers cannot be written: %s", exc)


def _read(path: Path) -> dict[str, LayerProfile]:
    """Read the measurements; shapes in an unusable file are measured again."""
    try:
        document: Any = json.loads(read_private(path, most_bytes=_MOST_BYTES))
        return {str(key): _profile(value) for key, value in document.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ConfigInvalid) as exc:
        logger.warning("measured layers are forgotten: %s cannot be used: %s", path, exc)
        return {}


def _profile(stored: dict[str, Any]) -> LayerProfile:
    curves: dict[str, Any] = {
        name: tuple(Point(**point) for point in stored[name]) for name in ("decode", "prefill", "head")
    }
    return LayerProfile(**stored | curves)
