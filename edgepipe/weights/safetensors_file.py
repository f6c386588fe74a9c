"""safetensors: header checks and reads of single tensors, from one file or a folder with an index.

Layout: u64 header length | header JSON ``{name: {dtype, shape, data_offsets: [begin, end)}}`` | data without holes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.files.file_bytes import read_at
from edgepipe.files.safe_path import member_path
from edgepipe.files.strict_json import parse_json_object, read_json_object
from edgepipe.plain_words import plain
from edgepipe.spec.stored_types import CODE_TYPES, FLOAT_TYPES
from edgepipe.spec.tensors import TensorInfo, TensorPlace

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 200_000  # the largest mixture-of-experts models have about 100,000
MAX_DIMS = 8
MAX_INDEX_BYTES = 64 << 20
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_SCHEMES = {**FLOAT_TYPES, **CODE_TYPES}


class SafetensorsFiles:
    """Tensors of one or more safetensors files, read lazily."""

    def __init__(self, places: Mapping[str, tuple[Path, TensorPlace]]) -> None:
        self._places = dict(places)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors, by name."""
        return {name: place.info for name, (_, place) in self._places.items()}

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Read a tensor's bytes. Raises ModelInvalid if the file is too short."""
        return self.read_range(name, 0, self._places[name][1].info.num_bytes)

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Read a part of a tensor's bytes. Raises ModelInvalid like ``read``."""
        path, place = self._places[name]
        return read_at(path, place.offset + offset, num_bytes, what=f"tensor '{name}'")


def open_safetensors(folder: Path) -> SafetensorsFiles:
    """Open a model folder's tensors, single or indexed. Raises ModelInvalid (damaged, missing, outside the folder)."""
    index = folder / INDEX_FILE
    names, where = (set(_read_index(index).values()), INDEX_FILE) if index.exists() else ({SINGLE_FILE}, "the folder")
    paths = {name: member_path(folder, name, where=where) for name in sorted(names)}
    places = indexed_places(folder, {name: _read_places(path) for name, path in paths.items()})
    return SafetensorsFiles({tensor: (paths[file], place) for tensor, (file, place) in places.items()})


def indexed_places(folder: Path, files: Mapping[str, Mapping[str, TensorPlace]]) -> dict[str, tuple[str, TensorPlace]]:
    """Return each tensor's file and place, by the folder's index; without an index, those of the only file.

    ``files``: the places of each weight file that the index names. Raises ModelInvalid.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        return {tensor: (file, place) for file, places in files.items() for tensor, place in places.items()}
    shard_of = _read_index(index)
    for tensor, shard in shard_of.items():
        if tensor not in files[shard]:
            raise ModelInvalid(f"'{shard[:80]}' lacks a tensor", fact=f"{INDEX_FILE} names it for '{tensor[:80]}'")
    return {tensor: (shard, files[shard][tensor]) for tensor, shard in shard_of.items()}


def shard_names(folder: Path) -> tuple[str, ...]:
    """Return the names of a model folder's weight files. Raises ModelInvalid."""
    index = folder / INDEX_FILE
    if index.exists():
        return tuple(sorted(set(_read_index(index).values())))
    if not os.path.lexists(folder / SINGLE_FILE):
        raise ModelInvalid(
            f"'{folder.name}' has no weights",
            fact=f"it has neither {SINGLE_FILE} nor {INDEX_FILE}",
            next_step="pull a folder with safetensors, or a GGUF file",
        )
    return (SINGLE_FILE,)


def _read_index(index: Path) -> dict[str, str]:
    return parse_weight_map(read_json_object(index, max_bytes=MAX_INDEX_BYTES))


def parse_weight_map(index: Mapping[str, object]) -> dict[str, str]:
    """Return the file of each tensor from an index file's content. Raises ModelInvalid."""
    entries = index.get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise ModelInvalid(f"'{INDEX_FILE}' has no weight_map", fact="it should give the file of each tensor")
    shards = cast("dict[str, object]", entries)
    if len(shards) > MAX_TENSORS or not all(isinstance(shard, str) for shard in shards.values()):
        raise ModelInvalid(f"'{INDEX_FILE}' has an unusable weight_map", fact=f"{len(shards)} entries")
    return cast("dict[str, str]", shards)


def parse_safetensors(file: BinaryIO, *, size: int, name: str) -> dict[str, TensorPlace]:
    """Return the tensors' places in a file of ``size`` bytes. Reads only its header. Raises ModelInvalid."""
    if size < 10:
        raise _bad(name, f"it has {size} bytes")
    header_bytes = int.from_bytes(_take(file, 8, name), "little")
    if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise _bad(name, f"its header claims {header_bytes} bytes, the file has {size}")
    data = _take(file, header_bytes, name)
    if not data.startswith(b"{"):
        raise _bad(name, "its header does not begin with '{'")
    header = parse_json_object(data, what=f"the header of '{name}'")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise _bad(name, f"it claims {len(header)} tensors, at most {MAX_TENSORS} are read")
    return _check_entries(name, header, start=8 + header_bytes, data_bytes=size - 8 - header_bytes)


def _read_places(path: Path) -> dict[str, TensorPlace]:
    try:
        with path.open("rb") as file:
            return parse_safetensors(file, size=os.fstat(file.fileno()).st_size, name=path.name)
    except OSError as exc:
        raise ModelInvalid(f"'{path.name}' cannot be read", fact=plain(exc)) from exc


def _take(file: BinaryIO, num_bytes: int, name: str) -> bytes:
    data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise _bad(name, "it ends within its header")
    return data


def _check_entries(file: str, header: dict[str, Any], *, start: int, data_bytes: int) -> dict[str, TensorPlace]:
    """Check each entry, and that all entries by offset cover the data without hole or overlap."""
    spans = {name: _check_entry(file, name, entry) for name, entry in header.items()}
    position = 0
    places: dict[str, TensorPlace] = {}
    for name, (begin, info) in sorted(spans.items(), key=lambda item: (item[1][0], item[1][1].num_bytes)):
        if begin != position:
            raise _bad(file, f"tensor '{name[:80]}' begins at {begin}, the previous one ends at {position}")
        position = begin + info.num_bytes
        places[name] = TensorPlace(offset=start + begin, info=info)
    if position != data_bytes:
        raise _bad(file, f"its tensors cover {position} bytes, the file holds {data_bytes} after the header")
    return places


def _check_entry(file: str, name: str, entry: object) -> tuple[int, TensorInfo]:
    fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
    scheme, shape, offsets = fields.get("dtype"), _naturals(fields.get("shape")), _naturals(fields.get("data_offsets"))
    if shape is None or len(shape) > MAX_DIMS or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(file, f"tensor '{name[:80]}' has an unusable shape or offsets")
    if not isinstance(scheme, str) or scheme not in _SCHEMES:
        raise _bad(file, f"tensor '{name[:80]}' has type {str(scheme)[:20]!r}; {', '.join(_SCHEMES)} are read")
    num_bytes = _SCHEMES[scheme]
    for dim in shape:
        num_bytes *= dim
    if num_bytes != offsets[1] - offsets[0]:
        raise _bad(file, f"tensor '{name[:80]}' of shape {shape} does not take {offsets[1] - offsets[0]} bytes")
    return offsets[0], TensorInfo(name=name, shape=shape, scheme=scheme, num_bytes=num_bytes)


def _naturals(value: object) -> tuple[int, ...] | None:
    """Return a list of integers from 0 to 2^62, or None. ``True`` does not count as an integer."""
    if not isinstance(value, list):
        return None
    items = cast("list[object]", value)
    if len(items) > MAX_DIMS:
        return None
    good = all(type(item) is int and 0 <= item < 1 << 62 for item in items)
    return tuple(cast("list[int]", items)) if good else None


def _bad(file: str, fact: str) -> ModelInvalid:
    return ModelInvalid(
        f"'{file}' is not a usable safetensors file",
        fact=fact,
        next_step="fetch the model again: edgepipe models pull MODEL",
    )
