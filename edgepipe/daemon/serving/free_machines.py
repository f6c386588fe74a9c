"""PURE: when machines that a model does not use are worth a look: once they have been free for a while.

The shell is ``ReplicaWatch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SETTLED_S = 10.0  # a machine that comes back gets its old work first


@dataclass(slots=True)
class _Seen:
    free: frozenset[str]
    since_s: float
    tried: frozenset[str] = frozenset()  # machines that did not pay, or got a pipeline


class FreeMachines:
    """The free machines of the models that may get more pipelines. Call ``look`` after every change and at its time."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    @property
    def wake_at_s(self) -> float | None:
        """When ``look`` is due without a change."""
        return min((seen.since_s + SETTLED_S for seen in self._seen.values() if seen.free - seen.tried), default=None)

    def look(self, free: Mapping[str, frozenset[str]], now_s: float) -> list[str]:
        """Return the models for which a further pipeline should be tried now; each set of machines is tried once.

        ``free``: machines that hold nothing, by model; a model that cannot grow now is left out.
        """
        for model in self._seen.keys() - free.keys():
            self._seen[model].free = frozenset()
        due: list[str] = []
        for model, machines in free.items():
            seen = self._seen.setdefault(model, _Seen(machines, now_s))
            if seen.free != machines:
                seen.free, seen.since_s, seen.tried = machines, now_s, seen.tried & machines
            if seen.free - seen.tried and now_s >= seen.since_s + SETTLED_S:
                seen.tried = seen.free
                due.append(model)
        return due

    def forget(self, models: frozenset[str]) -> None:
        """Forget all other models: they are not served, or their number of pipelines is given."""
        for model in self._seen.keys() - models:
            del self._seen[model]
