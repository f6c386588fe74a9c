"""A second model that drafts for a served one: found, compared, and counted in placements."""

from __future__ import annotations

import asyncio

from edgepipe.daemon.files.models import LocalModel, Models
from edgepipe.errors import ConfigInvalid, EdgepipeError, ModelInvalid, ModelUnknown, NoFeasiblePlacement
from edgepipe.spec.drafting import DRAFT_WAYS, check_can_draft
from edgepipe.text.vocabularies import check_same_vocabulary
from edgepipe.wire.engines import ServeSpec


async def with_draft_model(models: Models, name: str, model: LocalModel) -> LocalModel:
    """Return the model with the draft model that a person names (``--draft NAME``).

    Raises ModelInvalid, and ConfigInvalid if it is unknown, cannot draft or has another vocabulary.
    """
    try:
        draft = await models.resolve(name)
        check_can_draft(draft.config, draft.name)
        await asyncio.to_thread(_compare, model, draft)
    except ModelUnknown as error:
        raise ConfigInvalid(
            f"--draft cannot be '{name[:120]}'",
            fact=f"it is {', '.join(DRAFT_WAYS)}, or a model; {error.what} ({error.fact})",
            next_step=error.next_step,
        ) from error
    except ModelInvalid as error:
        raise error.changed(next_step=f"{error.next_step or 'pull it again'}, or leave --draft out") from error
    return model.drafted_by(draft)


def no_room(name: str, lacks: NoFeasiblePlacement) -> str:
    """Say that a model is served without the draft model, which does not fit."""
    return (
        f"the draft model {name} does not fit beside the head: {lacks.what} ({lacks.fact}). Drafts come from a lookup"
    )


async def as_drafted(models: Models, spec: ServeSpec, model: LocalModel) -> LocalModel:
    """Return a served model with the draft model of its settings; without one that cannot be had."""
    settings = spec.settings
    if not settings.draft_model:
        return model
    try:
        return model.drafted_by(await models.adopt(settings.draft_model, manifest_hash=settings.draft_hash))
    except EdgepipeError:
        return model  # the stage with the head meets the same error, and says so


def _compare(model: LocalModel, draft: LocalModel) -> None:
    check_same_vocabulary(model.name, model.stored.tokenizer(), draft.name, draft.stored.tokenizer())
