"""The files of a draft model, for the stage with the head."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from edgepipe.daemon.files.models import LocalModel, Models
from edgepipe.errors import EdgepipeError
from edgepipe.spec.facts import whole_slice
from edgepipe.wire.children import PrepareProgress, PrepareRequest

logger = logging.getLogger(__name__)


class DraftFiles:
    """The draft model that a stage wants. A stage is served without one that cannot be had."""

    def __init__(self, models: Models, wanted: PrepareRequest, *, wanted_by: str) -> None:
        """``wanted_by``: see ``Models.adopt``."""
        self._models = models
        self._wanted = wanted
        self._wanted_by = wanted_by
        self.model: LocalModel | None = None  # set by ``fetch``

    @property
    def path(self) -> str:
        """Folder or file of the model; empty without one."""
        return str(self.model.path) if self.model is not None else ""

    async def fetch(self) -> AsyncGenerator[PrepareProgress]:
        """Fetch all its tensors that are not here. Do nothing for a stage without the head."""
        wanted, settings = self._wanted, self._wanted.settings
        if not settings.draft_model or not any(part.head for part in wanted.placement.slices):
            return
        try:
            model = await self._models.adopt(
                settings.draft_model,
                manifest_hash=settings.draft_hash,
                first_source=wanted.weights_node,
                wanted_by=self._wanted_by,
            )
            whole = (whole_slice(model.config),)
            async with aclosing(self._models.fetch(model, whole, first_source=wanted.weights_node)) as fetching:
                async for progress in fetching:
                    yield progress
        except EdgepipeError as error:
            logger.warning(
                "the draft model %s cannot be used: %s. Drafts come from a lookup", settings.draft_model, error
            )
            return
        self.model = model
