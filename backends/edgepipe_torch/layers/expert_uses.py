"""How often each expert of a model was chosen, kept on disk: a later load leaves those used most on the device.

Routers prefer some experts. Stages with experts in host memory learn every choice there, so they count without cost.
One file beside the model holds the counts of all layers that this node ever computed so. A file that cannot be used or
written changes nothing but which experts are where.
"""

from __future__ import annotations

import json
import logging
import secrets
from contextlib import suppress
from typing import cast

import numpy as np
import numpy.typing as npt

from edgepipe.weights.repacked import RepackedPlace

logger = logging.getLogger(__name__)

FILE_NAME = "expert-uses.json"
_MOST_BYTES = 4 << 20  # 100 layers of 512 experts with counts of ten digits take 0.6 MB
_MOST_USES = 1 << 40  # limit of one expert's count: older counts are halved above it

Uses = npt.NDArray[np.int64]


class ExpertUses:
    """Counts of the layers of one load."""

    def __init__(self, place: RepackedPlace | None) -> None:
        """``place``: beside the model; None: counts of this load alone, which nothing reads."""
        self._place = place
        self._kept = _read(place)
        self._new: dict[int, Uses] = {}

    def kept(self, layer: int, count: int) -> tuple[int, ...]:
        """Return how often each of a layer's ``count`` experts was chosen before this load; empty: not known."""
        found = self._kept.get(layer, ())
        return found if len(found) == count else ()

    def counter(self, layer: int, count: int) -> Uses:
        """Return the array [count] to which this load's choices of a layer are added."""
        return self._new.setdefault(layer, np.zeros(count, np.int64))

    def save(self) -> None:
        """Add this load's choices to the file. Call once, at the end."""
        if self._place is None or not any(counts.any() for counts in self._new.values()):
            return
        layers = _read(self._place)  # another stage may have written meanwhile
        for layer, counts in self._new.items():
            before = layers.get(layer, ())
            total = counts + (np.array(before, np.int64) if len(before) == len(counts) else 0)
            layers[layer] = tuple((total // 2 if total.max() > _MOST_USES else total).tolist())
        text = json.dumps({"source": self._place.source, "layers": layers})
        part = self._place.folder / f"{FILE_NAME}.{secrets.token_hex(4)}.part"
        try:
            self._place.folder.mkdir(mode=0o700, exist_ok=True)
            part.write_text(text, encoding="utf-8")
            part.replace(self._place.folder / FILE_NAME)
        except OSError as exc:
            logger.info("how often experts were used is not kept: %s", exc)
            with suppress(OSError):
                part.unlink()


def _read(place: RepackedPlace | None) -> dict[int, tuple[int, ...]]:
    """Return the kept counts of these model files by layer; empty if no load kept any."""
    if place is None:
        return {}
    try:
        with (place.folder / FILE_NAME).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError("it is too large")
        return _parsed(json.loads(text), place.source)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as exc:
        logger.info("how often experts were used is not known: %s", exc)
        return {}


def _parsed(value: object, source: str) -> dict[int, tuple[int, ...]]:
    """Raises ValueError for another form."""
    match value:
        case {"source": str(of), "layers": dict(layers)}:
            if of != source:
                return {}
        case _:
            raise ValueError("it has another form")
    found: dict[int, tuple[int, ...]] = {}
    for layer, counts in cast("dict[str, object]", layers).items():
        if not layer.isdecimal() or len(layer) > 4 or not isinstance(counts, list):
            raise ValueError("it has another form")
        numbers = cast("list[object]", counts)
        uses = [each for each in numbers if type(each) is int and 0 <= each <= 2 * _MOST_USES]
        if len(uses) != len(numbers):
            raise ValueError("it has another form")
        found[int(layer)] = tuple(uses)
    return found
