"""The setting ``kv``, which all backends obey alike."""

from __future__ import annotations

from edgepipe.errors import ConfigInvalid
from edgepipe.spec.kv_forms import KV_FORMS


def checked_kv(form: str) -> str:
    """Return a form of KV that all backends know; empty: the compute dtype. Raises ConfigInvalid for another one."""
    if form not in ("", *KV_FORMS):
        raise ConfigInvalid(f"kv cannot be '{form}'", fact=f"it is empty, {' or '.join(KV_FORMS)}")
    return form
