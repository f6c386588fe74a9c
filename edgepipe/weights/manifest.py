"""The manifest of a model's content: every tensor and file with its size and SHA-256.

Two nodes hold the same model exactly if their manifests have equal hashes: the same tensors, shape, tokenizer, chat
templates and end tokens. Names and sources do not count. Metadata files count by their canonical form
(``canonical.py``), not by their bytes; their SHA-256 only shows whether a file arrived undamaged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from edgepipe.errors import ModelInvalid
from edgepipe.files.canonical import value_digest
from edgepipe.files.fields import Fields
from edgepipe.files.safe_path import check_member_name
from edgepipe.files.strict_json import parse_json_object
from edgepipe.plain_words import plain
from edgepipe.spec.stored_types import stored_bytes
from edgepipe.spec.tensors import TensorInfo

CARD_FILE = "edgepipe.json"
TOKENIZER_FILE = "tokenizer.json"
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20  # a tensor takes about 210 bytes
MAX_TENSORS = 200_000  # safetensors of MiniMax-M2 in FP8 have 95,000: each expert's matrices and scales
MAX_FILES = 4096
MAX_METADATA_BYTES = 64 << 20  # one metadata file; the largest tokenizers take about 34 MB
METADATA_LIMITS = {CARD_FILE: 16 << 20, TOKENIZER_FILE: MAX_METADATA_BYTES}
"""Files that nodes exchange besides tensors, with the maximum size of each: 80 MB together."""

_MAX_VALUES = 16 * MAX_TENSORS + 8 * MAX_FILES  # more than all entries need

_TENSOR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor: its description, and the hash of its bytes as ``WeightSource.read`` returns them."""

    info: TensorInfo
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of the model's folder. A peer needs the metadata files besides tensors."""

    name: str
    num_bytes: int
    sha256: str
    metadata: bool
    content: str = ""  # SHA-256 of the canonical form of a metadata file


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """List of a model's parts. Values from peers are checked on reading."""

    model_id: str
    source: str  # its origin, for people; a hub source also serves to fetch tensors (``hub.parse_pinned``)
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the content: tensors, and the canonical forms of the metadata files."""
        tensors = sorted((_tensor_json(entry) for entry in self.tensors), key=lambda item: item["name"])
        return value_digest(
            {"tensors": tensors, "metadata": {entry.name: entry.content for entry in self.metadata_files}}
        )

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        """Tensors by name."""
        return {entry.info.name: entry for entry in self.tensors}

    @property
    def metadata_files(self) -> tuple[FileEntry, ...]:
        """Files that every node needs, independent of its layers; only those of ``METADATA_LIMITS``."""
        return tuple(entry for entry in self.files if entry.metadata)

    @property
    def metadata_bytes(self) -> int:
        """Total bytes of the metadata files."""
        return sum(entry.num_bytes for entry in self.metadata_files)

    def to_json(self) -> bytes:
        """Serialise the manifest; ``from_json`` restores an equal one."""
        value = {
            "model_id": self.model_id,
            "source": self.source,
            "tensors": [_tensor_json(entry) for entry in self.tensors],
            "files": [_file_json(entry) for entry in self.files],
        }
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse and check a manifest: names stay in a folder, sizes fit shapes, no duplicates. Raises ModelInvalid."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise ModelInvalid("the model's manifest is too large", fact=f"{len(data)} bytes")
        values = parse_json_object(data, what="the model's manifest", max_values=_MAX_VALUES)
        fields = Fields(values, what="the model's manifest")
        tensors = tuple(_tensor_from_json(item) for item in _objects(fields, "tensors", most=MAX_TENSORS))
        files = tuple(_file_from_json(item) for item in _objects(fields, "files", most=MAX_FILES))
        names = [entry.info.name for entry in tensors] + [f"/{entry.name}" for entry in files]
        if len(set(names)) != len(names):
            raise fields.fail("tensors", "a name occurs twice")
        return cls(model_id=fields.text("model_id"), source=fields.text("source"), tensors=tensors, files=files)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a stored model. Raises ModelInvalid."""
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ModelInvalid(f"'{path.name}' is too large", fact=f"{path.stat().st_size} bytes")
        return Manifest.from_json(path.read_bytes())
    except OSError as exc:
        raise ModelInvalid(f"'{path.name}' cannot be read", fact=plain(exc)) from exc


def _objects(fields: Fields, key: str, *, most: int) -> list[Fields]:
    items = fields.items(key)
    if len(items) > most:
        raise fields.fail(key, f"it has {len(items)} entries, at most {most} are read")
    if not all(isinstance(item, dict) for item in items):
        raise fields.fail(key, "a list of objects is needed")
    return [Fields(cast("dict[str, object]", item), what=f"the model's manifest ({key})") for item in items]


def _tensor_json(entry: TensorEntry) -> dict[str, Any]:
    return {**asdict(entry.info), "sha256": entry.sha256}


def _file_json(entry: FileEntry) -> dict[str, Any]:
    return {key: value for key, value in asdict(entry).items() if key != "content" or value}


def _tensor_from_json(fields: Fields) -> TensorEntry:
    name, scheme = fields.text("name"), fields.text("scheme")
    if not _TENSOR_NAME.fullmatch(name) or ".." in name:
        raise fields.fail("name", f"{name[:80]!r} is not a tensor's name")
    shape = fields.items("shape")
    if stored_bytes((0,), scheme) is None:
        raise fields.fail("scheme", f"{scheme[:40]!r} is unknown")
    if len(shape) > 8 or not all(type(dim) is int and 0 < dim < 1 << 62 for dim in shape):
        raise fields.fail("shape", f"it is {str(shape)[:80]}")
    dims = tuple(cast("list[int]", shape))
    num_bytes = fields.integer("num_bytes", low=1, high=1 << 50)
    if num_bytes != stored_bytes(dims, scheme):
        raise fields.fail("num_bytes", f"'{name}' {list(dims)} in {scheme} does not take {num_bytes} bytes")
    rounded = fields.flag("rounded", default=False)
    info = TensorInfo(name=name, shape=dims, scheme=scheme, num_bytes=num_bytes, rounded=rounded)
    return TensorEntry(info=info, sha256=_digest(fields, "sha256"))


def _file_from_json(fields: Fields) -> FileEntry:
    name = check_member_name(fields.text("name"), where="the model's manifest")
    metadata = fields.flag("metadata", default=False)
    if metadata and name not in METADATA_LIMITS:
        raise fields.fail("metadata", f"nodes do not exchange files named '{name[:80]}'")
    return FileEntry(
        name=name,
        num_bytes=fields.integer("num_bytes", low=0, high=METADATA_LIMITS[name] if metadata else 1 << 50),
        sha256=_digest(fields, "sha256"),
        metadata=metadata,
        content=_digest(fields, "content") if metadata else "",
    )


def _digest(fields: Fields, key: str) -> str:
    digest = fields.text(key)
    if not _SHA256.fullmatch(digest):
        raise fields.fail(key, f"{digest[:80]!r} is not a SHA-256")
    return digest
