"""Models that people know by a short name, and where a pull finds them. The table is ``known_models.json``.

Each name is also that of a shape (``edgepipe.shapes``), so that a model can be planned before it is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DEMO = "demo"
USUAL_TYPE = "Q4_K_M"  # about as good as larger types, at the fewest bytes of which that is true

_WORDS_LEFT_OUT = ("instruct", "it", "chat", "gguf", "hf", "latest")  # words at the end of a name that are ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One model of the table."""

    name: str  # name of the model and of its shape
    title: str  # name as its makers write it
    repository: str  # ORG/NAME on the hub, with GGUF files; DEMO: the demo model
    type: str  # fetched and planned unless a person names another one, in capital letters
    also: tuple[str, ...]  # further short names
    offered: bool  # the wizard offers it to a person who has no model yet

    @property
    def typed(self) -> str:
        """The name with its type, as ``plan`` prints it: ``qwen3-8b:q4_k_m``."""
        return f"{self.name}:{self.type.lower()}"


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return the table, in its order."""
    rows = json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    return tuple(
        KnownModel(
            name=row["name"],
            title=row["title"],
            repository=row["repository"],
            type=row.get("type", USUAL_TYPE),
            also=tuple(row.get("also", ())),
            offered=row.get("offered", False),
        )
        for row in rows
    )


@cache
def models_by_key() -> Mapping[str, KnownModel]:
    """Return the models by the keys of all their names."""
    return {key_of(name): model for model in known_models() for name in (model.name, *model.also)}


def key_of(name: str) -> str:
    """Return the letters and digits of a name, without words such as "instruct" at its end.

    Equal keys mean the same model: ``Llama 3.3 70B``, ``llama-3.3-70b``, ``Llama_3.3-70B-Instruct-GGUF``.
    """
    words = re.findall(r"[a-z0-9.]+", name.lower())
    while len(words) > 1 and words[-1] in _WORDS_LEFT_OUT:
        words.pop()
    return "".join(words).replace(".", "")
