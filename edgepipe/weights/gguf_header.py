"""GGUF's header: metadata and the tensor table. Every size is checked before memory is allocated for it.

Layout (GGUF 2 and 3, little-endian)::

    "GGUF" | u32 version | u64 tensors | u64 entries | entries... | tensor table... | padding | tensor data
    entry:  string key | u32 type | value         string: u64 length, bytes
    tensor: string name | u32 dims | u64 dims... (innermost first) | u32 type | u64 offset into the data
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.plain_words import plain
from edgepipe.spec.gguf_types import GGUF_TYPES, BlockType

_MAGIC = b"GGUF"
MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 262,144 tokens with its merges and scores takes about 20 MB
MAX_ENTRIES = 4096  # real files have about 30 to 80
MAX_TENSORS = 65_536  # the largest mixture-of-experts files have below 5,000
MAX_ARRAY_ITEMS = 4_000_000  # vocabularies end at 262,144, merges at about 600,000
MAX_ARRAY_STRINGS = 2_000_000  # limit of all arrays together: a short string takes 60 bytes in memory, 10 in the file
MAX_ITEM_BYTES = 64 << 10  # a string in an array; tokens stay below 1 KB
MAX_KEY_BYTES = 65_535  # the format's own limit
MAX_STRING_BYTES = 16 << 20  # chat templates stay below 100 KB
MAX_TENSOR_NAME_BYTES = 256  # llama.cpp's limit is 64
MAX_DIMS = 4

GgufValue = bool | int | float | str | list[str] | npt.NDArray[np.generic]

_ARRAY, _STRING = 9, 8
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL = 7
_OTHER_TYPES = {  # withdrawn from ggml, or never meant for weights; other forks use numbers above these
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    41: "Q1_0",
}
_SHOWN_CHARS = 300  # longest fact of an error; keys and names in it may be long


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One row of the tensor table, with a row-major shape and an absolute offset."""

    name: str
    shape: tuple[int, ...]
    block: BlockType
    offset: int  # place of the data, bytes from the file's start
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Everything before a GGUF file's tensor data."""

    version: int
    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]
    alignment: int
    data_start: int


def is_gguf(path: Path) -> bool:
    """Return whether a file is named like a GGUF file or begins like one, whatever its name is."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse and check a GGUF file's header. Raises ModelInvalid, which names the file and the fault."""
    try:
        with path.open("rb", buffering=1 << 20) as file:
            return parse_gguf_header(file, size=os.fstat(file.fileno()).st_size, name=path.name)
    except OSError as exc:
        raise ModelInvalid(f"'{path.name}' cannot be read", fact=plain(exc)) from exc


def parse_gguf_header(file: BinaryIO, *, size: int, name: str) -> GgufHeader:
    """Parse the header of an open file of ``size`` bytes, positioned at its start. Raises ModelInvalid."""
    return _parse(_Reader(file, size, name))


class _Reader:
    """Reads little-endian values within the file's end and the header's limit."""

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self._file = file
        self._name = name
        self._end = min(size, MAX_HEADER_BYTES)
        self.size = size
        self.position = 0
        self.strings_left = MAX_ARRAY_STRINGS  # strings that all further arrays may have together

    @property
    def left(self) -> int:
        """Number of bytes that may still be read."""
        return self._end - self.position

    def fail(self, fact: str) -> ModelInvalid:
        return ModelInvalid(
            f"'{self._name}' is not a usable GGUF file",
            fact=fact if len(fact) <= _SHOWN_CHARS else f"{fact[:_SHOWN_CHARS]}...",
            next_step="fetch the file again: edgepipe models pull FILE",
        )

    def unreadable_type(self, tensor: str, kind: int) -> ModelInvalid:
        return ModelInvalid(
            f"'{self._name}' has weights in the format {_OTHER_TYPES.get(kind, f'number {kind}')}, which is not read",
            fact=f"tensor '{tensor}' has it",
            next_step="pull another type of the model: edgepipe models pull ORG/NAME:Q4_K_M",
        )

    def take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self._end - self.position:
            if self._end == self.size:
                raise self.fail(
                    f"the file ends early: {what} needs {num_bytes} bytes at {self.position} of {self.size}"
                )
            raise self.fail(f"{what} needs {num_bytes} bytes at {self.position}, a header has at most {self._end}")
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self.fail(f"the file ends early: it ended at {self.position + len(data)} while {what} was read")
        self.position += num_bytes
        return data

    def number(self, layout: str, what: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def string(self, what: str, *, limit: int) -> bytes:
        length = self.number("<Q", what)
        if length > limit:
            raise self.fail(f"{what} is {length} bytes long, at most {limit} are allowed")
        return self.take(length, what)


def _parse(reader: _Reader) -> GgufHeader:
    version = _check_magic(reader)
    num_tensors = _count(reader, "tensors", limit=MAX_TENSORS)
    num_entries = _count(reader, "metadata entries", limit=MAX_ENTRIES)
    metadata = _read_metadata(reader, num_entries)
    alignment = _alignment(reader, metadata)
    rows = [_read_row(reader, index) for index in range(num_tensors)]
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, block, offset in rows:
        if name in tensors:
            raise reader.fail(f"tensor '{name}' occurs twice")
        tensors[name] = _check_place(reader, name, shape, block, offset, alignment, data_start)
    _check_overlaps(reader, tensors)
    return GgufHeader(version=version, metadata=metadata, tensors=tensors, alignment=alignment, data_start=data_start)


def _check_magic(reader: _Reader) -> int:
    magic = reader.take(4, "the magic")
    if magic != _MAGIC:
        raise reader.fail("it does not begin with 'GGUF': another kind of file, or a damaged download")
    version = reader.number("<I", "the version")
    if version in (0x02000000, 0x03000000):
        raise reader.fail("it is big-endian; only little-endian files are read")
    if version not in (2, 3):
        raise reader.fail(f"it has version {version}; 2 and 3 are known")
    return version


def _count(reader: _Reader, what: str, *, limit: int) -> int:
    count = reader.number("<Q", f"the number of {what}")
    if count > limit:
        raise reader.fail(f"it claims {count} {what}, at most {limit} are allowed")
    return count


def _read_metadata(reader: _Reader, count: int) -> dict[str, GgufValue]:
    metadata: dict[str, GgufValue] = {}
    for index in range(count):
        key = _text(
            reader, reader.string(f"the key of entry {index}", limit=MAX_KEY_BYTES), f"the key of entry {index}"
        )
        if key in metadata:
            raise reader.fail(f"the key '{key}' occurs twice")
        metadata[key] = _read_value(reader, reader.number("<I", key), key)
    return metadata


def _text(reader: _Reader, data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise reader.fail(f"{what} is not UTF-8") from exc


def _read_value(reader: _Reader, kind: int, key: str) -> GgufValue:
    if kind == _STRING:
        return reader.string(f"the value of '{key}'", limit=MAX_STRING_BYTES).decode("utf-8", "replace")
    if kind == _ARRAY:
        return _read_array(reader, key)
    if kind not in _SCALARS:
        raise reader.fail(f"'{key}' has the unknown value type {kind}")
    value = reader.number(_SCALARS[kind], f"the value of '{key}'")
    return bool(value) if kind == _BOOL else value


def _read_array(reader: _Reader, key: str) -> GgufValue:
    kind = reader.number("<I", key)
    count = reader.number("<Q", key)
    item_bytes = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind]) if kind in _SCALARS else 0
    if not item_bytes:
        raise reader.fail(f"'{key}' is an array of type {kind}; only numbers and strings may be in arrays")
    if count > MAX_ARRAY_ITEMS or count * item_bytes > reader.left:
        raise reader.fail(f"'{key}' claims {count} items, more than the file or the limit of {MAX_ARRAY_ITEMS} allow")
    if kind == _STRING:
        return _read_strings(reader, key, count)
    dtype = np.dtype("?" if kind == _BOOL else _SCALARS[kind])
    return np.frombuffer(reader.take(count * item_bytes, key), dtype)


def _read_strings(reader: _Reader, key: str, count: int) -> list[str]:
    """Read an array of strings. A hot loop: a vocabulary with its merges has 10^5 to 10^6 strings."""
    reader.strings_left -= count
    if reader.strings_left < 0:
        raise reader.fail(f"'{key}' has {count} strings; all arrays together may have {MAX_ARRAY_STRINGS}")
    take: Callable[[int, str], bytes] = reader.take
    length_of = struct.Struct("<Q").unpack
    items: list[str] = []
    for _ in range(count):
        (length,) = length_of(take(8, key))
        if length > MAX_ITEM_BYTES:
            raise reader.fail(f"'{key}' has an item of {length} bytes, at most {MAX_ITEM_BYTES} are allowed")
        items.append(take(length, key).decode("utf-8", "replace"))
    return items


def _alignment(reader: _Reader, metadata: dict[str, GgufValue]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment > 1 << 20 or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment is {alignment}; a power of two from 8 to 1048576 is needed")
    return alignment


def _read_row(reader: _Reader, index: int) -> tuple[str, tuple[int, ...], BlockType, int]:
    raw = reader.string(f"the name of tensor {index}", limit=MAX_TENSOR_NAME_BYTES)
    name = _text(reader, raw, f"the name of tensor {index}")
    num_dims = reader.number("<I", name)
    if not 1 <= num_dims <= MAX_DIMS:
        raise reader.fail(f"tensor '{name}' has {num_dims} dimensions, 1 to {MAX_DIMS} are allowed")
    dims = struct.unpack(f"<{num_dims}Q", reader.take(8 * num_dims, name))
    kind = reader.number("<I", name)
    offset = reader.number("<Q", name)
    if kind not in GGUF_TYPES:
        raise reader.unreadable_type(name, kind)
    return name, dims[::-1], GGUF_TYPES[kind], offset


def _check_place(
    reader: _Reader, name: str, shape: tuple[int, ...], block: BlockType, offset: int, alignment: int, data_start: int
) -> GgufTensor:
    """Check a tensor's place. Sizes are Python integers, so a product above 64 bits is just larger than the file."""
    values = 1
    for dim in shape:
        values *= dim
    if values == 0 or shape[-1] % block.block_values:
        raise reader.fail(f"tensor '{name}' of shape {shape} is empty or has no whole blocks of {block.block_values}")
    num_bytes = values // block.block_values * block.block_bytes
    if offset % alignment:
        raise reader.fail(f"tensor '{name}' begins at {offset}, which is not aligned to {alignment}")
    if offset + num_bytes > reader.size - data_start:
        needs = f"tensor '{name}' needs {num_bytes} bytes at {data_start + offset}, it has {reader.size}"
        raise reader.fail(f"the file ends early: {needs}")
    return GgufTensor(name=name, shape=shape, block=block, offset=data_start + offset, num_bytes=num_bytes)


def _check_overlaps(reader: _Reader, tensors: dict[str, GgufTensor]) -> None:
    end, previous = 0, ""
    for tensor in sorted(tensors.values(), key=lambda item: item.offset):
        if tensor.offset < end:
            raise reader.fail(f"tensors '{previous}' and '{tensor.name}' overlap")
        end, previous = tensor.offset + tensor.num_bytes, tensor.name
