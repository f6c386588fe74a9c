"""A folder with one file per tensor, for any part of a model, filled from peers or the hub: hash-checked, resumable.

::

    edgepipe.json  tokenizer.json ...   metadata files
    manifest.json                       manifest of the whole model
    tensors/NAME.bin                    complete and checked
    tensors/NAME.bin.part               incomplete
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.files.file_bytes import read_at
from edgepipe.spec.tensors import TensorInfo
from edgepipe.weights.manifest import Manifest, TensorEntry

TENSOR_FOLDER = "tensors"
_READ_BYTES = 1 << 20


class TensorFolder:
    """Tensors of a folder. Missing tensors are listed, but reading them raises."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder / TENSOR_FOLDER
        self._infos = {entry.info.name: entry.info for entry in manifest.tensors}

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors of the model, present or not."""
        return self._infos

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Read a tensor's bytes. Raises ModelInvalid if it is missing or too short."""
        return self.read_range(name, 0, self._infos[name].num_bytes)

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Read a part of a tensor's bytes. Raises ModelInvalid like ``read``."""
        path = tensor_path(self._folder, name)
        if not path.exists():
            raise ModelInvalid(
                f"tensor '{name}' is not on this node",
                fact="a node fetches only the layers that it serves",
            )
        return read_at(path, offset, num_bytes, what=f"tensor '{name}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingTensor:
    """A tensor to fetch, and its bytes already present."""

    name: str
    num_bytes: int
    have_bytes: int  # offset at which to continue


class ShardWriter:
    """Fills a tensor folder. Only one process may write a folder at a time; files appear complete and checked."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder / TENSOR_FOLDER
        self._manifest = manifest
        self._folder.mkdir(parents=True, exist_ok=True)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the whole model."""
        return self._manifest

    def missing(self, names: Iterable[str]) -> list[MissingTensor]:
        """Return the tensors that are not complete, in order. Raises ModelInvalid for unknown names."""
        entries = [self._entry(name) for name in names]
        return [
            MissingTensor(name=entry.info.name, num_bytes=entry.info.num_bytes, have_bytes=self._have(entry))
            for entry in entries
            if not tensor_path(self._folder, entry.info.name).exists()
        ]

    def open(self, name: str) -> TensorSink:
        """Start or resume writing a tensor at the sink's ``position``. Raises ModelInvalid for an unknown name."""
        return TensorSink(tensor_path(self._folder, self._entry(name).info.name), self._entry(name))

    def _have(self, entry: TensorEntry) -> int:
        part = _part_path(tensor_path(self._folder, entry.info.name))
        return min(part.stat().st_size, entry.info.num_bytes) if part.exists() else 0

    def _entry(self, name: str) -> TensorEntry:
        entry = self._manifest.by_name.get(name)
        if entry is None:
            raise ModelInvalid(
                f"the model has no tensor '{name[:80]}'", fact=f"{len(self._manifest.tensors)} are known"
            )
        return entry


class TensorSink:
    """Writes one tensor's bytes in order. A context manager: leaving it keeps an incomplete part for later."""

    def __init__(self, path: Path, entry: TensorEntry) -> None:
        self._path = path
        self._entry = entry
        self._file: BinaryIO = _part_path(path).open("ab+", buffering=0)
        self._digest = hashlib.sha256()
        self.position = 0  # bytes present; offset of the next write
        self._take_up()

    def seek(self, offset: int) -> None:
        """Truncate the part to ``offset``. Raises ModelInvalid if the part is shorter."""
        if offset > self.position:
            raise ModelInvalid(
                f"tensor '{self._entry.info.name}' cannot continue at byte {offset}",
                fact=f"{self.position} bytes are present",
            )
        if offset < self.position:
            os.ftruncate(self._file.fileno(), offset)
            self._take_up()

    def write(self, chunk: bytes | memoryview) -> None:
        """Append bytes. For more bytes than the manifest promised, delete the part and raise ModelInvalid."""
        if self.position + len(chunk) > self._entry.info.num_bytes:
            self._discard()
            raise self._refused(f"more than the promised {self._entry.info.num_bytes} bytes arrived")
        self._file.write(chunk)
        self._digest.update(chunk)
        self.position += len(chunk)

    def finish(self) -> bool:
        """Check the tensor and move it into place. Return False if bytes are missing.

        If the hash differs, deletes the part and raises ModelInvalid.
        """
        if self.position < self._entry.info.num_bytes:
            return False
        if self._digest.hexdigest() != self._entry.sha256:
            self._discard()
            raise self._refused("its SHA-256 differs from the manifest's")
        os.fsync(self._file.fileno())
        _part_path(self._path).replace(self._path)
        return True

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()

    def __enter__(self) -> TensorSink:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _take_up(self) -> None:
        """Hash the part that an earlier transfer left."""
        self._digest, self.position = hashlib.sha256(), 0
        self._file.seek(0)
        while data := self._file.read(_READ_BYTES):
            self._digest.update(data)
            self.position += len(data)
        if self.position > self._entry.info.num_bytes:
            os.ftruncate(self._file.fileno(), 0)
            self._take_up()

    def _discard(self) -> None:
        self._file.close()
        _part_path(self._path).unlink(missing_ok=True)

    def _refused(self, fact: str) -> ModelInvalid:
        return ModelInvalid(
            f"tensor '{self._entry.info.name}' arrived damaged",
            fact=fact,
            next_step="the node fetches it again from another source",
        )


def tensor_path(folder: Path, name: str) -> Path:
    """Return a tensor's path; names were checked when the manifest was read."""
    return folder / f"{name}.bin"


def _part_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def is_complete(folder: Path, name: str) -> bool:
    """Return whether a tensor is complete in a model's folder; ``name`` is in the model's manifest."""
    return tensor_path(folder / TENSOR_FOLDER, name).exists()


def complete_names(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the tensors that are complete in a model's folder."""
    try:
        present = {entry.name for entry in os.scandir(folder / TENSOR_FOLDER)}
    except FileNotFoundError:
        return []
    return [name for name in names if tensor_path(folder, name).name in present]
