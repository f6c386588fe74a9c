"""Loads models on request: a request for a model on a disk of the cluster starts the load and waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from edgepipe.errors import CapacityError, EdgepipeError
from edgepipe.gateway.models import ModelEntry, ModelTable
from edgepipe.model.names import canonical_name

WAIT_S = 60.0  # then the request gets a 503 and may be sent again; clients give up later


class ModelLoads:
    """Finds a request's model, served or loadable."""

    def __init__(self, models: ModelTable, *, load: Callable[[str], None], wait_s: float = WAIT_S) -> None:
        """``load`` requests a model and returns at once; ``failed`` reports that it was not loaded."""
        self._models = models
        self._load = load
        self._wait_s = wait_s
        self._loadable: frozenset[str] = frozenset()
        self._asked: dict[str, EdgepipeError | None] = {}  # requested models, with the error of a failed load

    def update(self, loadable: Iterable[str]) -> None:
        """Replace the names of models that a request may load."""
        self._loadable = frozenset(loadable)

    def can_load(self, name: str) -> bool:
        """Return whether a request may load the model."""
        return name in self._loadable

    def failed(self, model: str, error: EdgepipeError) -> None:
        """Report that a model was not loaded: requests that wait for it end with the error."""
        self._asked[model] = error
        self._models.notify()

    async def entry(self, name: str | None) -> ModelEntry:
        """Return the entry of a model, as ``ModelTable.get``. Load the model first if it is loadable.

        A model that is being stopped is loadable once its engine has ended, so the request waits for that.

        Raises the errors of ``get``, the error that ``failed`` reported, or CapacityError if loading takes too long.
        """
        wanted = canonical_name(name or "")
        await self._stopped(wanted)
        try:
            return self._models.get(name)
        except CapacityError:
            if wanted not in self._asked or self._asked[wanted] is not None:
                raise  # a user has served it, perhaps after a request's load failed
        except EdgepipeError:
            if wanted not in self._loadable:
                raise
            self._asked[wanted] = None
            self._load(wanted)
        return await self._waited_for(wanted)

    async def _stopped(self, name: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                while self._models.is_stopping(name):
                    await self._models.changed()

    async def _waited_for(self, name: str) -> ModelEntry:
        fact = ""
        coming = False  # while False, errors in the view may be from an earlier attempt
        try:
            async with asyncio.timeout(self._wait_s):
                while (why := self._asked.get(name)) is None:
                    try:
                        return self._models.get(name)
                    except CapacityError as error:
                        coming, fact = True, error.fact
                    except EdgepipeError:
                        if coming:
                            raise
                    await self._models.changed()
        except TimeoutError:
            raise CapacityError(
                f"the model '{name}' is not ready yet",
                fact=fact or f"its load started {self._wait_s:.0f} s ago",
                next_step="try again in a moment",
            ) from None
        raise why
