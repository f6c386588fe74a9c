"""The draft model of ``edgepipe plan --draft NAME``: its memory beside the head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgepipe.errors import ConfigInvalid, ModelUnknown

if TYPE_CHECKING:
    from pathlib import Path

    from edgepipe.planner.cluster import Cluster
    from edgepipe.spec.facts import ModelConfig
    from edgepipe.weights.weight_table import WeightTable


def with_draft_model(cluster: Cluster, name: str, *, models_dir: Path | None) -> Cluster:
    """Return the cluster with the memory of a draft model counted where the head goes.

    ``models_dir``: models on this machine's disk; None: known shapes only. Raises ConfigInvalid, ModelInvalid.
    """
    from edgepipe.spec.drafting import check_can_draft, draft_kv_tokens
    from edgepipe.weights.weight_table import DraftModelNeed

    try:
        config, table = _shape_of(name, models_dir)
    except ModelUnknown as error:
        raise ConfigInvalid(
            f"--draft cannot be '{name[:120]}'",
            fact=f"it is mtp, off, or a model; {error.what}",
            next_step=error.next_step,
        ) from error
    check_can_draft(config, name)
    need = DraftModelNeed(config=config, weights=table, kv_tokens=draft_kv_tokens(config))
    return replace(cluster, weights=replace(cluster.weights, draft=need))


def _shape_of(name: str, models_dir: Path | None) -> tuple[ModelConfig, WeightTable]:
    """Return a model's shape and forms: of the files here, else of a known name. Raises ModelUnknown, ModelInvalid."""
    from edgepipe.store.store import ModelStore
    from edgepipe.store.typed_names import meant_names, planned_name
    from edgepipe.weights.mixes import named_model

    if models_dir is not None:
        store = ModelStore(models_dir)
        here = meant_names(name, (stored.id for stored in store.list()))
        if len(here) == 1:
            stored = store.resolve(here[0])
            return stored.config, stored.weight_table
    return named_model(planned_name(name))
