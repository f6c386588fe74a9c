"""Loads models on request: a request for a model on a disk of the cluster starts the load and waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from edgepipe.errors import CapacityError, EdgepipeError
from edgepipe.gateway.models import ModelEntry, ModelTable
from edgepipe.wire.children import LoadQueue

WAIT_S = 60.0  # longest wait; then the request gets a 503 and may be sent again. Clients give up later


class ModelLoads:
    """Finds a request's model, served or loadable."""

    def __init__(self, models: ModelTable, *, load: Callable[[str, str], None], wait_s: float = WAIT_S) -> None:
        """``load`` requests a model for the owner of a key, and returns at once.

        ``queue`` is set to what loads and what waits, ``failed`` reports that a model was not loaded.
        """
        self._models = models
        self._load = load
        self._wait_s = wait_s
        self._loadable: frozenset[str] = frozenset()
        self.queue = LoadQueue()
        self._asked: dict[str, EdgepipeError | None] = {}  # requested models, with the error of a failed load

    def update(self, loadable: Iterable[str]) -> None:
        """Replace the names of models that a request may load."""
        self._loadable = frozenset(loadable)

    def meant(self, name: str) -> str:
        """Return the name of the served or loadable model that a request means, see ``ModelTable.meant``."""
        return self._models.meant(name, self._loadable)

    def can_load(self, name: str) -> bool:
        """Return whether a request may load the model."""
        return name in self._loadable

    def failed(self, model: str, error: EdgepipeError) -> None:
        """Report that a model was not loaded: requests that wait for it end with the error."""
        self._asked[model] = error
        self._models.notify()

    async def entry(self, name: str | None, *, owner: str = "") -> ModelEntry:
        """Return the entry of a model, as ``ModelTable.get``. Load the model first if it is loadable.

        The loads of several owners begin in turn.

        A model that is being stopped is loadable once its engine has ended, so the request waits for that.

        Raises the errors of ``get``, the error that ``failed`` reported, or CapacityError if loading takes too long.
        """
        wanted = self.meant(name) if name else ""
        await self._stopped(wanted)
        try:
            return self._models.get(wanted)
        except CapacityError:
            if wanted not in self._asked or self._asked[wanted] is not None:
                raise  # a user has served it, perhaps after a request's load failed
        except EdgepipeError:
            if wanted not in self._loadable:
                raise
            self._asked[wanted] = None
            self._load(wanted, owner)
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
            raise self._late(name, fact) from None
        raise why

    def _late(self, name: str, fact: str) -> CapacityError:
        """Return the error of a request that has waited for ``wait_s``."""
        if not fact and name in self.queue.waiting:
            place = self.queue.waiting.index(name) + 1
            return CapacityError(
                f"the load of the model '{name}' has not begun after {self._wait_s:.0f} s",
                fact=f"it is number {place} of {len(self.queue.waiting)} that wait while others load: "
                f"{', '.join(self.queue.loading)}",
                next_step="send the request again within two minutes: the model keeps its place",
            )
        began = "it loads" if name in self.queue.loading else "its load has not begun"
        return CapacityError(
            f"the model '{name}' is not ready yet",
            fact=fact or f"{began}, after {self._wait_s:.0f} s",
            next_step="try again in a moment",
        )
