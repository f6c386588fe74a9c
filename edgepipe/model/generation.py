"""How a model's makers advise to sample from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgepipe.errors import ModelInvalid
from edgepipe.model.strict_json import read_json_object

GENERATION_FILE = "generation_config.json"
_RANGES = {
    "temperature": (0.001, 2.0),
    "top_p": (0.001, 1.0),
    "top_k": (1, 1 << 20),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def sampling_advice(folder: Path) -> dict[str, float]:
    """The sampling parameters of ``generation_config.json``, by the names of OpenAI's fields and ours.

    Empty where there is no such file, it cannot be read, or it asks for greedy sampling: small models loop with that.
    A value out of range is left out.
    """
    try:
        told = read_json_object(folder / GENERATION_FILE)
    except (ModelInvalid, OSError):
        return {}
    if told.get("do_sample") is False:
        return {}
    return {name: told[name] for name in _RANGES if _usable(told, name)}


def _usable(told: Mapping[str, Any], name: str) -> bool:
    value, (lowest, highest) = told.get(name), _RANGES[name]
    kinds = int if name == "top_k" else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and lowest <= value <= highest
