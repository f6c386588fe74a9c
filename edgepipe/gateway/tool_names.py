"""Map tools' names of clients to names that every model and every format can write, and back. PURE.

MCP allows more names than models know: with ``.``, ``/``, ``:`` and spaces, longer than 64 characters, in any script.
The model sees a safe name in the tools, in earlier turns and in its own calls; the client sees only its own.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

MAX_NAME_CHARS = 64  # longest name that a model sees
_SAFE = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}")
_UNSAFE_CHAR = re.compile(r"[^a-zA-Z0-9_-]")
_DIGEST_CHARS = (6, 12, 40)  # lengths of a name's ending, tried in order until the name differs from all others


@dataclass(frozen=True, slots=True)
class ToolNames:
    """Names of a request's tools. A name depends on the request's tools only, not on their order."""

    changed: Mapping[str, str] = field(
        default_factory=dict[str, str]
    )  # model's name by the client's, where they differ
    kept: frozenset[str] = frozenset()  # names that are the same on both sides

    def for_model(self, name: str) -> str:
        """Return the model's name of a tool. It may be a tool of an earlier turn that the request no longer has."""
        if name in self.changed:
            return self.changed[name]
        if name in self.kept or not name:
            return name
        taken = {*self.kept, *self.changed.values()}
        return name if is_safe(name) and name not in taken else _free_name(name, taken)

    def for_client(self, name: str) -> str:
        """Return the client's name of a tool that the model has named."""
        return next((given for given, mapped in self.changed.items() if mapped == name), name)


def is_safe(name: str) -> bool:
    """Return whether models and formats can write the name."""
    return _SAFE.fullmatch(name) is not None


def tool_names(names: Sequence[str]) -> ToolNames:
    """Return the names of tools. Names that would become the same get an ending of their own."""
    kept = frozenset(filter(is_safe, names))
    unsafe = {name for name in names if name not in kept}
    wanted = [_plain(name) for name in unsafe]
    common = {name for name in wanted if wanted.count(name) > 1}
    return ToolNames({name: _free_name(name, {*kept, *common}) for name in sorted(unsafe)}, kept)


def _free_name(name: str, taken: Collection[str]) -> str:
    plain, digest = _plain(name), _digest(name)
    endings = ["" if len(name) <= MAX_NAME_CHARS else None, *(f"_{digest[:count]}" for count in _DIGEST_CHARS)]
    found = (plain[: MAX_NAME_CHARS - len(ending)] + ending for ending in endings if ending is not None)
    return next(each for each in found if each not in taken)


def _plain(name: str) -> str:
    """Return the name in ASCII, without accents, with ``_`` for other characters."""
    letters = "".join(each for each in unicodedata.normalize("NFKD", name) if not unicodedata.combining(each))
    plain = _UNSAFE_CHAR.sub("_", letters)[:MAX_NAME_CHARS]
    return plain if re.search("[a-zA-Z0-9]", plain) else f"tool_{_digest(name)[:8]}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
