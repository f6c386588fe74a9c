"""Which layers' routed experts stay in host memory, on a stage whose device is too small for them. PURE.

A share of the layers, in percent, spread evenly: so any slice of a model, and a probe's few layers, has about that
share, too. The share is part of the backend's kind (``edgepipe.model.resident``): "torch-cuda/40" keeps the experts of
40 % of the layers in host memory. Nodes of earlier versions know no such kind and take all weights to be wide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgepipe.errors import ConfigInvalid

SETTING = "experts_in_ram"
"""The backend's setting: "none", "all", or a share of the layers such as "40%"."""

AUTO = "auto"
"""A choice for a served model: the planner chooses each stage's share."""


def chosen_share(settings: Mapping[str, str]) -> int:
    """Return the share of layers in percent that a backend's settings select. Raises ConfigInvalid."""
    wanted = settings.get(SETTING, "none")
    if wanted in ("none", "all"):
        return 0 if wanted == "none" else 100
    percent = _percent(wanted.removesuffix("%"))
    if not wanted.endswith("%") or percent is None:
        raise ConfigInvalid(
            f"{SETTING} cannot be '{wanted[:20]}'", fact="possible: none, all, or a share of the layers such as 40%"
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
            next_step="give auto, none, all, or a share of the layers such as 40%",
        ) from error
    return as_setting(percent) if percent else ""


def as_setting(percent: int) -> str:
    """Return a share of the layers as the backend's setting."""
    return f"{percent}%"


def in_words(percent: int) -> str:
    """Return a share for the description of a stage; empty for none."""
    return f" (experts of {percent} % of the layers in RAM)" if percent else ""


def num_in_ram(layers: Iterable[int], percent: int) -> int:
    """Return how many of these layers, by index, have their experts in host memory at a share."""
    return sum(in_ram(layer, percent) for layer in layers)


def in_ram(layer: int, percent: int) -> bool:
    """Return whether a layer's experts are in host memory, if those of so many percent of the layers are."""
    return (layer + 1) * percent // 100 > layer * percent // 100


def with_share(kind: str, percent: int) -> str:
    """Return the kind of a backend that keeps the experts of so many percent of the layers in host memory."""
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
