"""PURE. Which of the models that requests want are loaded now, and which wait."""

from __future__ import annotations

from dataclasses import dataclass

MOST_LOADING = 5  # models loaded at the same time
MOST_PER_OWNER = 4  # models that one key loads, so that the loads of one user leave room for another's
MOST_WAITING = 32
PATIENCE_S = 120.0  # a model that no request has wanted for so long waits no longer


@dataclass(slots=True)
class _Waiting:
    """A model that waits."""

    owner: str  # key that wanted the model first
    wanted_s: float  # time when a request last wanted the model


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now."""

    start: tuple[str, ...] = ()  # models to load
    refused: str = ""  # a model that cannot wait, since too many do


class LoadTurns:
    """Starts the loads of all keys in turn: the next is of the key with the fewest, and of those the oldest."""

    def __init__(self) -> None:
        self._loading: dict[str, str] = {}  # model -> owner
        self._waiting: dict[str, _Waiting] = {}  # models in order of arrival

    @property
    def loading(self) -> tuple[str, ...]:
        """Models that are loaded now, oldest first."""
        return tuple(self._loading)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Models that wait, in the order in which their loads begin if no other is wanted."""
        ranks: dict[str, int] = {}
        ranked: list[tuple[int, str]] = []
        for model, waiting in self._waiting.items():
            ranks[waiting.owner] = rank = ranks.get(waiting.owner, self._count(waiting.owner)) + 1
            ranked.append((rank, model))
        return tuple(model for _, model in sorted(ranked, key=lambda each: each[0]))

    def want(self, model: str, owner: str, *, now_s: float) -> Decision:
        """Take a request for a model."""
        self._forget(now_s)
        if model in self._loading:
            return Decision()
        if (known := self._waiting.get(model)) is not None:
            known.wanted_s = now_s
            return Decision(self._start())
        self._waiting[model] = _Waiting(owner, now_s)
        refused = self._surplus() if len(self._waiting) > MOST_WAITING else ""
        return Decision(self._start(), refused)

    def ended(self, model: str, *, now_s: float) -> Decision:
        """Take the end of a load."""
        self._loading.pop(model, None)
        self._forget(now_s)
        return Decision(self._start())

    def _start(self) -> tuple[str, ...]:
        started: list[str] = []
        while len(self._loading) < MOST_LOADING:
            allowed = (each for each in self.waiting if self._count(self._waiting[each].owner) < MOST_PER_OWNER)
            if (model := next(allowed, None)) is None:
                break
            self._loading[model] = self._waiting.pop(model).owner
            started.append(model)
        return tuple(started)

    def _surplus(self) -> str:
        """Remove the newest model of the key with the most waiting, and return it."""
        owners = [each.owner for each in self._waiting.values()]
        most = max(owners, key=owners.count)
        model = [name for name, each in self._waiting.items() if each.owner == most][-1]
        del self._waiting[model]
        return model

    def _forget(self, now_s: float) -> None:
        for model in [name for name, each in self._waiting.items() if now_s - each.wanted_s > PATIENCE_S]:
            del self._waiting[model]

    def _count(self, owner: str) -> int:
        return list(self._loading.values()).count(owner)
