"""Levels of ``reasoning_effort``: the nearest one that a template knows. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgepipe.text.conversations.probes import LEVELS
from edgepipe.text.conversations.traits import TemplateTraits

_MIDDLE = LEVELS.index("medium")


def known_effort(effort: str, traits: TemplateTraits) -> str | None:
    """Return the level that a template gets for a request's; None: it gets none, so it takes its own default.

    A template that refuses other levels gets the nearest one that it knows. A tie goes away from the middle: ``high``
    means more than ``medium``. Other templates treat a level that they do not know as their default, so only a level
    beyond those that they know becomes one of them.
    """
    if effort in traits.efforts:
        return effort
    if effort not in LEVELS:
        return None if traits.strict_efforts else effort
    place = LEVELS.index(effort)
    known = [LEVELS.index(level) for level in traits.efforts if level in LEVELS and level != "none"]
    if not traits.strict_efforts:
        known = [level for level in known if _MIDDLE < level < place or place < level < _MIDDLE]
    if not known:
        return None if traits.strict_efforts else effort
    return LEVELS[min(known, key=lambda level: (abs(level - place), -abs(level - _MIDDLE), -level))]


def keywords_of(given: Mapping[str, Any], effort: str | None, traits: TemplateTraits) -> dict[str, Any]:
    """Return the keywords of a template. ``effort`` is a request's ``reasoning_effort``.

    ``none`` turns reasoning off. Levels from ``low`` on turn it on where the template leaves it off.
    """
    keywords = dict(given)
    wanted = keywords.pop("reasoning_effort", effort)
    if isinstance(wanted, str):
        if (level := known_effort(wanted, traits)) is not None:
            keywords["reasoning_effort"] = level
        if traits.shortens and wanted in ("minimal", "low"):
            keywords.setdefault("low_effort", True)
    elif wanted is not None:
        keywords["reasoning_effort"] = wanted
    asked = None if wanted not in LEVELS or wanted == "minimal" else wanted != "none"
    switch = keywords.get("enable_thinking", asked)
    for name in traits.switches if switch is not None else ():
        keywords.setdefault(name, switch)
    return keywords
