"""A model's recommended sampling parameters, the defaults of requests."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

from edgepipe.errors import ModelInvalid
from edgepipe.files.fields import Fields
from edgepipe.files.strict_json import read_json_object

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
_BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0.0, float((1 << 31) - 1)),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""Supported defaults, with the bounds of the API."""

_GGUF_KEYS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys that llama.cpp's converter writes below ``general.sampling.``, and their names here."""

_UNUSED_KEYS = {"mirostat": 0, "xtc_probability": 0.0}  # keys that are not used, and the value that has no effect
_FLOAT32_DIGITS = 7  # digits that survive: 0.6 is stored as 0.60000002


def hf_sampling(folder: Path) -> dict[str, float]:
    """Return the usable defaults of ``generation_config.json``. Raises ModelInvalid if it is not JSON.

    A recommendation of greedy decoding is ignored, because small models then loop.
    """
    path = folder / GENERATION_FILE
    return _usable(read_json_object(path) if path.is_file() else {})


def gguf_sampling(metadata: Mapping[str, object], *, name: str) -> dict[str, float]:
    """Return the usable defaults of a GGUF file's metadata. Logs recommended samplers that edgepipe does not have.

    ``name``: of the model, for the log.
    """
    given = {key: metadata.get(f"general.sampling.{key}") for key in (*_GGUF_KEYS, *_UNUSED_KEYS)}
    unused = [key for key, idle in _UNUSED_KEYS.items() if given[key] not in (None, idle)]
    if unused:
        logger.info("the file recommends %s, which is not used model=%s", " and ".join(unused), name)
    return _usable({ours: _as_written(given[key]) for key, ours in _GGUF_KEYS.items()})


def _as_written(value: object) -> object:
    """Return a 32-bit float with the digits that the converter was given."""
    is_number = isinstance(value, float) and math.isfinite(value)
    return float(f"{value:.{_FLOAT32_DIGITS}g}") if is_number else value


def _usable(values: Mapping[str, object]) -> dict[str, float]:
    """Return the usable defaults among recommended values."""
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
