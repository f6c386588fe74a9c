"""Names of models: ``org/name`` or ``name``, and after a colon the type of a GGUF file, always in small letters.

::

    llama-3.3-70b:q4_k_m          <- llama-3.3-70b+q4_k_m           the folder in the store
    org/name:ud-q4_k_xl           <- org--name+ud-q4_k_xl

A name has no ``--``, ``-/`` or ``+``, so each folder belongs to one name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from edgepipe.errors import ModelInvalid

MAX_TYPE_CHARS = 64
_BASE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?"
_NAME = re.compile(rf"{_BASE}(?::[a-z0-9][a-z0-9._-]{{0,{MAX_TYPE_CHARS - 1}}})?")
_UNSLOTH = "ud-"  # Unsloth's types that keep more bits for some layers
_IMATRIX = "i1-"  # mradermacher's types with an importance matrix


def canonical_name(text: str) -> str:
    """Return the name with its type in small letters."""
    base, colon, kind = text.partition(":")
    return base + colon + kind.lower()


def is_name(text: str) -> bool:
    """Return whether a text is a model's name, in its canonical form."""
    return bool(_NAME.fullmatch(text)) and not any(part in text for part in ("--", "-/", ".."))


def folder_name(model_id: str) -> str:
    """Convert ``org/name:type`` to ``org--name+type``. Raises ModelInvalid for an id that is not a plain name."""
    name = canonical_name(model_id)
    if not is_name(name):
        raise ModelInvalid(
            f"'{model_id[:80]}' cannot be a model's name", fact="allowed are letters, digits, dots and dashes"
        )
    return name.replace("/", "--").replace(":", "+")


def name_of_folder(folder: str) -> str:
    """Convert ``org--name+type`` and ``org--name+type@HASH`` to ``org/name:type``."""
    return folder.split("@")[0].replace("--", "/").replace("+", ":")


def plain_type(kind: str) -> str:
    """Return a type in small letters without the maker's prefix: ``q4_k_xl`` for ``UD-Q4_K_XL``."""
    return kind.lower().removeprefix(_UNSLOTH).removeprefix(_IMATRIX)


def matching_names(wanted: str, known: Iterable[str]) -> list[str]:
    """Return the names of ``known`` that a person means by ``wanted``, in order: only the exact one if it is there.

    A person may leave out the organisation, the type, the type's prefix, and capital letters.
    """
    names = sorted(set(known))
    exact = [name for name in names if name.lower() == wanted.lower()]
    if exact:
        return [wanted] if wanted in exact else exact
    base, _, kind = wanted.lower().partition(":")
    same_base = [name for name in names if base in _bases(name)]
    same_type = [name for name in same_base if not kind or name.partition(":")[2].lower() == kind]
    return same_type or [name for name in same_base if plain_type(name.partition(":")[2]) == kind]


def _bases(name: str) -> tuple[str, str]:
    """Return the name without its type, with and without the organisation."""
    base = name.partition(":")[0].lower()
    return base, base.rsplit("/", 1)[-1]
