"""Unloads models that a request loaded, once no request has used them for the time of ``keep_alive``."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from edgepipe.clock import Clock
from edgepipe.gateway.engine_types import RoutedModel
from edgepipe.gateway.models import ModelTable
from edgepipe.ids import PipelineId
from edgepipe.wire.children import KeptModel, KeptModels

_FORGOTTEN_S = 86400.0
_FOR_EVER_S = 1e9
GRACE_S = 2.0  # shortest idle time: requests of other gateways show up with this delay

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+")


def keep_s(text: str) -> float:
    """Return the seconds of Ollama's ``keep_alive`` (``1h30m``, ``300``). Raises ValueError.

    A negative time, or one of more than 30 years, is inf.
    """
    size = text.removeprefix("-")
    if _NUMBER.fullmatch(size):
        seconds = float(size)
    elif size and not _PART.sub("", size):
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(size))
    else:
        raise ValueError(f"not a time: '{text}'")
    return math.inf if (text != size and seconds > 0) or seconds > _FOR_EVER_S else seconds


class KeepAlives:
    """Keeps the newest ``keep_alive`` of each loaded model, and unloads the model when that time is over."""

    def __init__(
        self,
        models: ModelTable,
        *,
        clock: Clock,
        unload: Callable[[str], None],
        report: Callable[[KeptModels], None] = lambda _: None,
    ) -> None:
        """``unload`` requests to stop a model, and returns at once. ``report`` takes all times whenever they change."""
        self._models = models
        self._clock = clock
        self._unload = unload
        self._report = report
        self._reported = KeptModels()
        self._keep_s: dict[PipelineId, float] = {}
        self._used: Counter[PipelineId] = Counter()  # requests that run in this gateway
        self._idle_since_s: dict[PipelineId, _Moment] = {}
        # Times that an earlier gateway or a lost engine left; not in the view.
        self._restored: dict[PipelineId, KeptModel] = {}

    def restore(self, kept: KeptModels) -> None:
        """Take the times that an earlier gateway of this node reported. A model that it used was idle since its end."""
        self._reported = kept
        now_s = self._clock.wall_s()
        for each in kept.models:
            self._restored[each.pipeline_id] = replace(each, idle_since_s=each.idle_since_s or now_s)
        self._models.notify()

    @contextmanager
    def use(self, served: RoutedModel, keep_s: float | None) -> Generator[None]:
        """Count a request as running. The model's time starts at its end, see ``want``."""
        self._used[served.pipeline_id] += 1
        try:
            yield
        finally:
            self._used[served.pipeline_id] -= 1
            self.want(served, keep_s)

    def want(self, served: RoutedModel, keep_s: float | None) -> None:
        """Restart the model's time: ``keep_s`` seconds (inf: for ever), None: as an earlier request set."""
        self._adopt(served.pipeline_id)
        if keep_s is not None:
            self._keep_s[served.pipeline_id] = keep_s
        self._idle_since_s.pop(served.pipeline_id, None)
        if served.pipeline_id in self._keep_s:
            self._models.notify()

    def left_s(self, served: RoutedModel) -> float:
        """Return the seconds until an idle model is unloaded; inf if it stays until a user stops it."""
        keep_s = self._keep_s.get(served.pipeline_id, math.inf) if served.on_request else math.inf
        now = self._now()
        idle_s = now.monotonic_s - self._idle_since_s.get(served.pipeline_id, now).monotonic_s
        return max(0.0, max(keep_s, GRACE_S) - idle_s)

    async def run(self) -> None:
        """Unload models whose time is over, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look()):
                    await self._models.changed()

    def _look(self) -> float | None:
        """Unload models that are due. Return the seconds until the next model is due, None without such a model."""
        now = self._now()
        known = {model.pipeline_id: model for model in self._models.served}
        served = {key: model for key, model in known.items() if model.on_request}
        for key in self._restored.keys() & known.keys():
            self._adopt(key)
        for key in [key for key, each in self._restored.items() if _is_old(each, now.wall_s)]:
            del self._restored[key]
        for gone in (self._keep_s.keys() | self._used.keys()) - served.keys():
            if gone not in known and self._keep_s.get(gone, math.inf) < math.inf:  # its engine may come back
                self._restored[gone] = self._kept(gone, idle_since_s=now.wall_s)
            self._keep_s.pop(gone, None)
            self._idle_since_s.pop(gone, None)
            if not self._used[gone]:
                del self._used[gone]
        next_s = math.inf
        for key in list(self._keep_s):
            if self._used[key] or served[key].num_requests:
                self._idle_since_s.pop(key, None)
                continue
            self._idle_since_s.setdefault(key, now)
            left_s = self.left_s(served[key])
            if left_s > 0:
                next_s = min(next_s, left_s)
            else:
                del self._keep_s[key]
                self._unload(served[key].name)
        self._report_changes()
        return next_s if next_s < math.inf else None

    def _now(self) -> _Moment:
        return _Moment(self._clock.monotonic_s(), self._clock.wall_s())

    def _adopt(self, key: PipelineId) -> None:
        """Continue an earlier gateway's time of this model."""
        kept = self._restored.pop(key, None)
        if kept is not None:
            now = self._now()
            idle_s = max(0.0, now.wall_s - kept.idle_since_s)
            self._keep_s[key] = kept.keep_s
            self._idle_since_s[key] = _Moment(now.monotonic_s - idle_s, now.wall_s - idle_s)

    def _kept(self, key: PipelineId, *, idle_since_s: float = 0.0) -> KeptModel:
        """Return a model's time. ``idle_since_s``: unless it is idle already."""
        idle_since = self._idle_since_s.get(key)
        return KeptModel(
            pipeline_id=key,
            keep_s=self._keep_s[key],
            idle_since_s=idle_since_s if idle_since is None else idle_since.wall_s,
        )

    def _report_changes(self) -> None:
        """Report all times that end. A model that stays for ever needs none."""
        own = [self._kept(key) for key, keep_s in self._keep_s.items() if keep_s < math.inf]
        kept = KeptModels(models=(*self._restored.values(), *own))
        if kept != self._reported:
            self._reported = kept
            self._report(kept)


@dataclass(frozen=True, slots=True)
class _Moment:
    """A moment by both clocks: another process knows the wall clock only."""

    monotonic_s: float
    wall_s: float


def _is_old(kept: KeptModel, now_s: float) -> bool:
    """Return whether a model that was never seen again was due long ago: it is served no more."""
    return now_s - kept.idle_since_s - kept.keep_s > _FORGOTTEN_S
