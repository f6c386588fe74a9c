"""A model's recommended sampling parameters, the defaults of requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgepipe.errors import ModelInvalid
from edgepipe.model.fields import Fields
from edgepipe.model.strict_json import read_json_object

GENERATION_FILE = "generation_config.json"
_BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0.0, float((1 << 31) - 1)),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""Supported defaults, with the bounds of the API."""


def hf_sampling(folder: Path) -> dict[str, float]:
    """Return the usable defaults of ``generation_config.json``. Raises ModelInvalid if it is not JSON.

    A recommendation of greedy decoding is ignored, because small models then loop.
    """
    path = folder / GENERATION_FILE
    values = read_json_object(path) if path.is_file() else {}
    if values.get("do_sample") is False or values.get("temperature") == 0:
        values = {"repetition_penalty": values.get("repetition_penalty")}
    found: dict[str, float] = {}
    for name in _BOUNDS:
        try:
            found |= checked_sampling({name: values.get(name)})
        except ModelInvalid:
            continue  # such as -1 for all, or a text: ignore it
    return found


def checked_sampling(values: Mapping[str, object]) -> dict[str, float]:
    """Return the supported defaults among the values. Raises ModelInvalid for a value out of bounds."""
    fields = Fields(values, what="the model's sampling defaults")
    numbers = {name: fields.optional_number(name, low=low, high=high) for name, (low, high) in _BOUNDS.items()}
    return {name: number for name, number in numbers.items() if number is not None}
