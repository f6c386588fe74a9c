"""What programs need to use a served model, for the page: the same text as ``edgepipe connect`` prints (PURE)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgepipe.gateway.programs import PROGRAMS, Served, small_context

KEY_FILE = Path("edgepipe-key")  # the page's reader puts the key there: the page does not show it


def programs_json(*, base_url: str, model: str, context_length: int, needs_key: bool) -> dict[str, Any]:
    """Return each program's text to copy.

    base_url   as the browser reaches this server, without ``/v1``
    needs_key  whether the server asks this client for a key; the text then reads it from ``KEY_FILE``
    """
    key_file = KEY_FILE if needs_key else None
    served = Served(base_url=base_url, model=model, context_length=context_length, key_file=key_file)
    programs = [
        {"name": name, "text": "\n".join(make(served).lines(served)), "warning": small_context(name, served)}
        for name, make in PROGRAMS.items()
    ]
    return {
        "model": model,
        "context": context_length,
        "base_url": base_url,
        "key_file": str(key_file or ""),
        "programs": programs,
    }
