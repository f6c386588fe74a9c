"""Models that fit this cluster, and their estimated speed, from memory sizes and matrix rates alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgepipe.cli.views.fitting import links_of, machines_of, rate_text, where_text
from edgepipe.model.mixes import named_model
from edgepipe.planner.preview import ModelFit, which_fit
from edgepipe.units import format_bytes

if TYPE_CHECKING:
    from edgepipe.wire.nodes import ClusterStatus

CATALOGUE: Mapping[str, str] = {
    "llama-3.3-70b:q4_k_m": "bartowski/Llama-3.3-70B-Instruct-GGUF:q4_k_m",
    "qwen3-32b:q4_k_m": "Qwen/Qwen3-32B-GGUF:q4_k_m",
    "qwen2.5-14b:q4_k_m": "bartowski/Qwen2.5-14B-Instruct-GGUF:q4_k_m",
    "qwen3-8b:q4_k_m": "Qwen/Qwen3-8B-GGUF:q4_k_m",
    "qwen3-4b:q4_k_m": "Qwen/Qwen3-4B-GGUF:q4_k_m",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm2-135m": "demo",
}
"""Known models by shape and type, and their names for ``models pull``; the demo model needs no hub."""

_USABLE_TOKENS_PER_S = 5.0  # about as fast as people read
_NAME_COLUMNS = max(map(len, CATALOGUE.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model to choose."""

    source: str  # for ``models pull``
    text: str  # one line for people
    tokens_per_s: float = 0.0  # of one chat, estimated; 0: it does not fit


def fitting_models(status: ClusterStatus) -> tuple[list[Fit], list[Fit]]:
    """Return the models that fit, largest first, and the models that do not."""
    machines = [(name, machines_of(status.members, *named_model(name))) for name in CATALOGUE]
    found = which_fit(machines, links_of(status.members))
    good = [
        Fit(source=CATALOGUE[fit.model], text=_text(fit), tokens_per_s=fit.plan.single.tokens_per_s)
        for fit in found
        if fit.plan is not None
    ]
    bad = [Fit(source=CATALOGUE[fit.model], text=_text(fit)) for fit in found if fit.plan is None]
    return good, bad


def best_fit(fits: Sequence[Fit]) -> Fit | None:
    """Return the largest model that answers as fast as people read, else the fastest model."""
    usable = next((fit for fit in fits if fit.tokens_per_s >= _USABLE_TOKENS_PER_S), None)
    return usable or max(fits, key=lambda fit: fit.tokens_per_s, default=None)


def _text(fit: ModelFit) -> str:
    size = format_bytes(fit.weight_bytes)
    name = f"{CATALOGUE[fit.model]:<{_NAME_COLUMNS}} {size:>9}"
    if fit.plan is None:
        return f"{name}  does not fit"
    return f"{name}  {where_text(fit.plan):<10} {rate_text(fit.plan)}"
