"""Further names of a served model, which its user chooses: ``edgepipe serve MODEL --name home``. PURE."""

from __future__ import annotations

import re
from collections.abc import Iterable

from edgepipe.errors import ConfigInvalid
from edgepipe.store.known_models import DEMO
from edgepipe.store.typed_names import understood

MAX_NAMES = 8  # most names of one model
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def checked_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names, each once and without ":latest". Raises ConfigInvalid."""
    found = tuple(dict.fromkeys(name.strip().removesuffix(":latest") for name in names))
    if len(found) > MAX_NAMES:
        raise ConfigInvalid(
            f"a model has at most {MAX_NAMES} further names",
            fact=f"{len(found)} were given",
            next_step=f"give --name at most {MAX_NAMES} times",
        )
    for name in found:
        if why := _why_not(name):
            raise ConfigInvalid(
                f"'{name[:80]}' cannot be a further name", fact=why, next_step="choose a name of your own: --name home"
            )
    return found


def allowed_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return those of another node's names that ``checked_names`` would accept."""
    return tuple(name for name in list(names)[:MAX_NAMES] if not _why_not(name))


def _why_not(name: str) -> str:
    if not _NAME.fullmatch(name):
        return "allowed are at most 64 letters, digits, dots and dashes"
    return "it is the name of a model" if name == DEMO or understood(name) is not None else ""
