"""Models that fit this cluster, and their estimated speed, from memory sizes and matrix rates alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgepipe.cli.views.fitting import links_of, machines_of, rate_text, where_text
from edgepipe.planner.preview import ModelFit, which_fit
from edgepipe.store.known_models import DEMO, known_models
from edgepipe.store.typed_names import understand
from edgepipe.units import format_bytes
from edgepipe.weights.mixes import named_model

if TYPE_CHECKING:
    from edgepipe.wire.nodes import ClusterStatus

_USABLE_TOKENS_PER_S = 5.0  # about as fast as people read
_NAME_COLUMNS = 27  # the longest of the names that are offered, with its type
HEADING = f"{'MODEL':<{_NAME_COLUMNS}} {'SIZE':>9}  {'FITS ON':<10} ONE CHAT"
"""Above the texts of fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model to choose."""

    source: str  # argument of ``models pull``
    text: str  # one line for people
    size_bytes: int = 0
    where: str = ""  # a node's name, or a number of nodes; empty: it does not fit
    tokens_per_s: float = 0.0  # estimated rate of one chat; 0: it does not fit

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        rate = round(self.tokens_per_s, 1)
        return {"model": self.source, "size_bytes": self.size_bytes, "fits": self.where, "tokens_per_s": rate}


def fitting_models(status: ClusterStatus) -> tuple[list[Fit], list[Fit]]:
    """Return the models that fit, largest first, and the models that do not."""
    names = [model.typed for model in known_models() if model.offered]
    machines = [(name, machines_of(status.members, *named_model(name))) for name in names]
    found = which_fit(machines, links_of(status.members))
    good = [
        Fit(
            source=_source(fit),
            text=_text(fit),
            size_bytes=fit.weight_bytes,
            where=where_text(fit.plan),
            tokens_per_s=fit.plan.single.tokens_per_s,
        )
        for fit in found
        if fit.plan is not None
    ]
    bad = [Fit(source=_source(fit), text=_text(fit), size_bytes=fit.weight_bytes) for fit in found if fit.plan is None]
    return good, bad


def best_fit(fits: Sequence[Fit]) -> Fit | None:
    """Return the largest model that answers as fast as people read, else the fastest model."""
    usable = next((fit for fit in fits if fit.tokens_per_s >= _USABLE_TOKENS_PER_S), None)
    return usable or max(fits, key=lambda fit: fit.tokens_per_s, default=None)


def _source(fit: ModelFit) -> str:
    """Return the name for ``models pull``, as people type it; the demo model's files need no hub."""
    return DEMO if understand(fit.model).repository == DEMO else fit.model


def _text(fit: ModelFit) -> str:
    size = format_bytes(fit.weight_bytes)
    name = f"{_source(fit):<{_NAME_COLUMNS}} {size:>9}"
    if fit.plan is None:
        return f"{name}  does not fit"
    return f"{name}  {where_text(fit.plan):<10} {rate_text(fit.plan)}"
