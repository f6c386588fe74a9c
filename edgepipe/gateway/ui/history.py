"""Recent speeds of each pipeline, one sample a second (PURE)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from edgepipe.wire.engines import EngineState

SECONDS = 900  # kept samples of a model
MOST_MODELS = 16  # pipelines with a history: names come from other nodes
_FIELDS = 4


class History:
    """Samples of every pipeline by its title, in a ring of ``SECONDS`` places. Those no longer served lose theirs."""

    def __init__(self) -> None:
        self._rows: dict[str, array[float]] = {}
        self._count = 0  # samples so far

    def sample(self, engines: Iterable[EngineState]) -> None:
        """Take the sample of a second."""
        served = {engine.title: engine for engine in engines}
        for model in [model for model in self._rows if model not in served]:
            del self._rows[model]
        place = self._count % SECONDS * _FIELDS
        for model, engine in served.items():
            rows = self._rows.get(model)
            if rows is None:
                if len(self._rows) >= MOST_MODELS:
                    continue
                rows = self._rows[model] = array("f", [-1.0]) * (SECONDS * _FIELDS)
            rows[place : place + _FIELDS] = array("f", row_of(engine))
        self._count += 1

    def newest(self) -> dict[str, list[float]]:
        """Return the last sample of each model, see ``row_of``."""
        place = (self._count - 1) % SECONDS * _FIELDS
        return {model: _rounded(rows[place : place + _FIELDS]) for model, rows in self._rows.items()}

    def all(self) -> dict[str, list[list[float]]]:
        """Return each model's samples, oldest first, one a second, the last one of now."""
        found: dict[str, list[list[float]]] = {}
        for model, rows in self._rows.items():
            order = [(self._count + index) % SECONDS * _FIELDS for index in range(SECONDS)]
            found[model] = [_rounded(rows[place : place + _FIELDS]) for place in order if rows[place] >= 0]
        return found


def row_of(engine: EngineState) -> tuple[float, float, float, float]:
    """Return a sample: tokens per second, the predicted rate, running and waiting sequences."""
    values = (engine.tokens_per_s, engine.predicted_tokens_per_s, engine.running, engine.waiting)
    tokens_per_s, predicted, running, waiting = (max(0.0, float(value)) for value in values)
    return tokens_per_s, predicted, running, waiting


def _rounded(row: Iterable[float]) -> list[float]:
    return [round(value, 2) for value in row]
