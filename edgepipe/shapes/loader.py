"""Load the shape of a model by its name, to plan and simulate it without weights.

The JSON files beside this module hold, by name, the fields of the published ``config.json`` that give sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from edgepipe.errors import ModelUnknown
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import ModelConfig


def named_shape(name: str) -> ModelConfig:
    """Return the shape of a model by a name such as ``qwen2.5-32b``. Raises ModelUnknown."""
    key = name.strip().lower().removesuffix("-instruct")
    if key not in _published():
        near = ", ".join(get_close_matches(key, shape_names()))
        raise ModelUnknown(
            f"the shape of '{name}' is not known",
            fact=f"{f'nearest: {near}; ' if near else ''}known models: {', '.join(shape_names())}",
            next_step="name one of them, with a type if it is packed: llama-3.3-70b:q4_k_m",
        )
    return _shape(key)


def shape_names() -> tuple[str, ...]:
    """Return the names of all shapes."""
    return tuple(_published())


@cache
def _shape(name: str) -> ModelConfig:
    return hf_config(_published()[name])


@cache
def _published() -> Mapping[str, Mapping[str, Any]]:
    files = sorted(Path(__file__).parent.glob("*.json"))
    return {name: fields for file in files for name, fields in json.loads(file.read_text(encoding="utf-8")).items()}
