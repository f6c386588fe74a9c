"""Find backends by entry point (group ``edgepipe.backends``). Only stage processes import them."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from edgepipe.errors import BackendUnavailable
from edgepipe.plain_words import plain

if TYPE_CHECKING:
    from edgepipe.backend.protocol import Backend, BackendFactory
    from edgepipe.backend.types import BackendOptions

GROUP = "edgepipe.backends"


def backend_names() -> tuple[str, ...]:
    """Return the names of the declared backends; their libraries may be missing."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def create_backend(name: str, options: BackendOptions) -> Backend:
    """Import and create the backend ``name``. Raises BackendUnavailable."""
    found = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if not found:
        raise BackendUnavailable(
            f"no backend '{name}' is installed", fact=f"installed: {', '.join(backend_names()) or 'none'}"
        )
    try:
        factory: BackendFactory = found[0].load()
    except ImportError as exc:
        raise BackendUnavailable(
            f"the {name} backend cannot be imported",
            fact=plain(exc),
            next_step=f"edgepipe update --extra {name}",
        ) from exc
    return factory(options)
