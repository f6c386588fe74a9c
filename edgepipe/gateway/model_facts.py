"""Facts about a model's files that lists of models show."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layout import slice_parameters
from edgepipe.spec.stored_types import CODE_TYPES, FLOAT_TYPES
from edgepipe.store.store import StoredModel
from edgepipe.weights.gguf_split import gguf_in
from edgepipe.weights.manifest import CARD_FILE, Manifest

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's files say, constant while they are there. Empty texts where they cannot be read."""

    format: str = ""  # "gguf" | "safetensors"
    family: str = ""  # such as "qwen3_moe"
    parameters: str = ""  # their number, such as "7.6B"
    quantisation: str = ""  # the type of most of its bytes, such as "Q4_K", or a format such as "AWQ 4-bit"
    modified_s: float = 0.0  # wall-clock time when this node got the model


def read_facts(path: Path) -> ModelFacts:
    """Read the facts of a stored model. Blocks for up to a second if it has many tensors."""
    modified_s = 0.0
    with contextlib.suppress(OSError):
        modified_s = (path / CARD_FILE).stat().st_mtime
    model = StoredModel(path.name, path)
    try:
        config, types = model.config, _bytes_by_type(model.manifest)
        is_gguf = gguf_in(path) is not None or bool(types.keys() - FLOAT_TYPES.keys() - CODE_TYPES.keys())
    except (ModelInvalid, OSError):
        return ModelFacts(modified_s=modified_s)
    return ModelFacts(
        format="gguf" if is_gguf else "safetensors",
        family=config.architecture,
        parameters=_in_words(_parameters(config)),
        quantisation=_quantisation(config, types),
        modified_s=modified_s,
    )


def _bytes_by_type(manifest: Manifest) -> Counter[str]:
    count: Counter[str] = Counter()
    for entry in manifest.tensors:
        count[entry.info.scheme] += entry.info.num_bytes
    return count


def _quantisation(config: ModelConfig, types: Counter[str]) -> str:
    if config.quantisation is not None:
        stored = config.quantisation.default
        return f"{stored.kind.upper()} {stored.bits}-bit"
    return types.most_common(1)[0][0] if types else ""


def _parameters(config: ModelConfig) -> int:
    return slice_parameters(config, Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True))


def _in_words(count: int) -> str:
    """Write a number of parameters as Ollama does: ``7.6B``."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
