"""The setting ``kv``, which all backends read alike."""

from __future__ import annotations

from collections.abc import Mapping

from edgepipe.errors import ConfigInvalid
from edgepipe.spec.facts import KV_8BIT


def chosen_kv(settings: Mapping[str, str]) -> str:
    """Return the form of KV that a backend's settings select; empty: the compute dtype. Raises ConfigInvalid."""
    wanted = settings.get("kv", "auto")
    if wanted not in ("auto", KV_8BIT):
        raise ConfigInvalid(f"kv cannot be '{wanted}'", fact=f"it is auto or {KV_8BIT}")
    return "" if wanted == "auto" else wanted
