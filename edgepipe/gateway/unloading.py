"""Unloads models that a request loaded, once no request has used them for the time of ``keep_alive``."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from edgepipe.clock import Clock
from edgepipe.gateway.engine_types import ServedModel
from edgepipe.gateway.models import ModelTable
from edgepipe.ids import PipelineId

GRACE_S = 2.0  # shortest idle time: requests of other gateways show up with this delay

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+")


def keep_s(text: str) -> float:
    """Return the seconds of Ollama's ``keep_alive`` (``1h30m``, ``300``); inf if it is negative. Raises ValueError."""
    size = text.removeprefix("-")
    if _NUMBER.fullmatch(size):
        seconds = float(size)
    elif size and not _PART.sub("", size):
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(size))
    else:
        raise ValueError(f"not a time: '{text}'")
    return math.inf if text != size and seconds > 0 else seconds


class KeepAlives:
    """Keeps the newest ``keep_alive`` of each loaded model, and unloads the model when that time is over."""

    def __init__(self, models: ModelTable, *, clock: Clock, unload: Callable[[str], None]) -> None:
        """``unload`` requests to stop a model, and returns at once."""
        self._models = models
        self._clock = clock
        self._unload = unload
        self._keep_s: dict[PipelineId, float] = {}
        self._used: Counter[PipelineId] = Counter()  # requests that run in this gateway
        self._idle_since_s: dict[PipelineId, float] = {}

    @contextmanager
    def use(self, served: ServedModel, keep_s: float | None) -> Generator[None]:
        """Count a request as running. The model's time starts at its end, see ``want``."""
        self._used[served.pipeline_id] += 1
        try:
            yield
        finally:
            self._used[served.pipeline_id] -= 1
            self.want(served, keep_s)

    def want(self, served: ServedModel, keep_s: float | None) -> None:
        """Restart the model's time: ``keep_s`` seconds (inf: for ever), None: as an earlier request set."""
        if keep_s is not None:
            self._keep_s[served.pipeline_id] = keep_s
        self._idle_since_s.pop(served.pipeline_id, None)
        if served.pipeline_id in self._keep_s:
            self._models.notify()

    def left_s(self, served: ServedModel) -> float:
        """Return the seconds until an idle model is unloaded; inf if it stays until a user stops it."""
        keep_s = self._keep_s.get(served.pipeline_id, math.inf) if served.on_request else math.inf
        now_s = self._clock.monotonic_s()
        return max(0.0, self._idle_since_s.get(served.pipeline_id, now_s) + max(keep_s, GRACE_S) - now_s)

    async def run(self) -> None:
        """Unload models whose time is over, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look()):
                    await self._models.changed()

    def _look(self) -> float | None:
        """Unload models that are due. Return the seconds until the next model is due, None without such a model."""
        now_s = self._clock.monotonic_s()
        served = {model.pipeline_id: model for model in self._models.served if model.on_request}
        for gone in (self._keep_s.keys() | self._used.keys()) - served.keys():
            self._keep_s.pop(gone, None)
            self._idle_since_s.pop(gone, None)
            if not self._used[gone]:
                del self._used[gone]
        next_s = math.inf
        for key in list(self._keep_s):
            if self._used[key] or served[key].num_requests:
                self._idle_since_s.pop(key, None)
                continue
            self._idle_since_s.setdefault(key, now_s)
            left_s = self.left_s(served[key])
            if left_s > 0:
                next_s = min(next_s, left_s)
            else:
                del self._keep_s[key]
                self._unload(served[key].name)
        return next_s if next_s < math.inf else None
