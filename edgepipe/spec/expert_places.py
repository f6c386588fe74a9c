"""Chooses the routed experts that stay in host memory if the stage's device is too small for all. PURE.

A share of each layer's experts, in percent, the same in every layer: so the CPU computes its experts of a layer while
the device computes the others. The share is part of the backend's kind (``edgepipe.weights.resident``): "torch-cuda/40"
keeps 40 % of the experts in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgepipe.errors import ConfigInvalid
from edgepipe.spec.facts import ModelConfig

SETTING = "experts_in_ram"
"""The backend's setting: "none", "all", or a share of each layer's experts such as "40%"."""

AUTO = "auto"
"""A choice for a served model: the planner chooses each stage's share."""


def chosen_share(settings: Mapping[str, str]) -> int:
    """Return the share of experts in percent that a backend's settings select. Raises ConfigInvalid."""
    wanted = settings.get(SETTING, "none")
    if wanted in ("none", "all"):
        return 0 if wanted == "none" else 100
    percent = _percent(wanted.removesuffix("%"))
    if not wanted.endswith("%") or percent is None:
        raise ConfigInvalid(
            f"{SETTING} cannot be '{wanted[:20]}'", fact="possible: none, all, or a share of the experts such as 40%"
        )
    return percent


def checked_choice(wanted: str) -> str:
    """Check what a user asks for a served model. Return "auto", a share such as "40%", or empty for none.

    Raises ConfigInvalid.
    """
    if wanted == AUTO:
        return AUTO
    try:
        percent = chosen_share({SETTING: wanted})
    except ConfigInvalid as error:
        raise ConfigInvalid(
            f"--experts-in-ram cannot be '{wanted[:20]}'",
            next_step="give auto, none, all, or a share of the experts such as 40%",
        ) from error
    return as_setting(percent) if percent else ""


def check_has_experts(wanted: str, config: ModelConfig) -> None:
    """Check that a model has the experts that a choice of ``checked_choice`` is about. Raises ConfigInvalid."""
    if wanted not in ("", AUTO) and all(spec.experts is None for spec in config.layers):
        raise ConfigInvalid(
            "--experts-in-ram is for mixtures of experts", fact="this model has none", next_step="leave it out"
        )


def as_setting(percent: int) -> str:
    """Return a share of the experts as the backend's setting."""
    return f"{percent}%"


def in_words(percent: int) -> str:
    """Return a share for the description of a stage; empty for none."""
    return f" ({percent} % of the experts in RAM)" if percent else ""


def num_in_ram(count: int, percent: int) -> int:
    """Return how many of a layer's ``count`` experts are in host memory: at least the share."""
    return -(-count * percent // 100)


def numbers_in_ram(count: int, percent: int, uses: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the numbers of a layer's experts in host memory, ascending.

    ``uses``: how often each expert was chosen before, for those used least; empty: numbers spread evenly, so that
    groups of experts have about the share, too.
    """
    wanted = num_in_ram(count, percent)
    spread = [number for number in range(count) if (number + 1) * wanted // count > number * wanted // count]
    if not uses:
        return tuple(spread)
    first = frozenset(spread)
    ranked = sorted(range(count), key=lambda number: (uses[number], number not in first))
    return tuple(sorted(ranked[:wanted]))


def with_ram_percent(kind: str, percent: int) -> str:
    """Return the kind of a backend that keeps ``percent`` of each layer's experts in host memory."""
    return f"{kind}/{percent}" if percent else kind


def split_kind(kind: str) -> tuple[str, int]:
    """Return a backend's kind without the share, and the share in percent."""
    base, _, text = kind.partition("/")
    percent = _percent(text)
    return (kind, 0) if percent is None else (base, percent)


def _percent(text: str) -> int | None:
    """Return a number up to 100; None for any other text."""
    if not text.isascii() or not text.isdecimal() or len(text) > 3 or int(text) > 100:
        return None
    return int(text)
