"""Whether a stored head is the embedding: files may hold a head of their own, or a copy of the embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layout import EMBEDDING, HEAD, shares
from edgepipe.spec.naming import NAMINGS
from edgepipe.spec.stored_types import FLOAT_TYPES
from edgepipe.spec.tensors import TensorInfo
from edgepipe.weights.dequantise import block_values

_CHUNK = 1 << 20  # bytes or values compared at once


class ReadsRanges(Protocol):
    """Tensors of which parts can be read."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        ...

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return a part of a tensor's bytes. Raises ModelInvalid."""
        ...


def stores_head(config: ModelConfig, stored: Iterable[str]) -> bool:
    """Return whether files with tensors of these names hold a head."""
    head = f"{NAMINGS[config.naming].head}."
    return any(name.startswith(head) and not name.endswith(".bias") for name in stored)


def head_is_embedding(config: ModelConfig, files: ReadsRanges) -> bool:
    """Return whether a stored head has the embedding's values, in the same format or as other floats.

    ``config``: untied, checked against the files. Reads both tables up to the first difference. Raises ModelInvalid.
    """
    tables: list[dict[str, TensorInfo]] = []
    for weight in (EMBEDDING, HEAD):
        (share,) = shares(config, weight)
        tables.append({name.removeprefix(share.module): files.infos[name] for name in share.parts})
    embedding, head = tables
    return embedding.keys() == head.keys() and all(_equal(files, embedding[part], head[part]) for part in head)


def _equal(files: ReadsRanges, one: TensorInfo, other: TensorInfo) -> bool:
    """Compare two stored tensors: bytes if both have one type, else the values of floats."""
    alike = one.scheme == other.scheme
    if one.shape != other.shape or not (alike or (one.scheme in FLOAT_TYPES and other.scheme in FLOAT_TYPES)):
        return False
    sizes = (1, 1) if alike else (FLOAT_TYPES[one.scheme], FLOAT_TYPES[other.scheme])
    total = one.num_bytes // sizes[0]
    for start in range(0, total, _CHUNK):
        count = min(_CHUNK, total - start)
        mine, theirs = (
            files.read_range(info.name, start * size, count * size)
            for info, size in zip((one, other), sizes, strict=True)
        )
        if not alike:
            mine, theirs = block_values(one.scheme, mine), block_values(other.scheme, theirs)
        if not np.array_equal(mine, theirs):
            return False
    return True
