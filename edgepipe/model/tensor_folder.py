"""A folder with one file per tensor, filled from peers or the hub: any part of a model, hash-checked, resumable.

::

    edgepipe.json  tokenizer.json ...   metadata files
    manifest.json                       what the whole model consists of
    tensors/NAME.bin                    complete and checked
    tensors/NAME.bin.part               what came so far
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
from edgepipe.model.file_bytes import read_at
from edgepipe.model.manifest import Manifest, TensorEntry
from edgepipe.model.tensors import TensorInfo

TENSOR_FOLDER = "tensors"
_READ_BYTES = 1 << 20


class TensorFolder:
    """The tensors of a folder; those that are not there yet are known by name and refuse to be read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder / TENSOR_FOLDER
        self._infos = {entry.info.name: entry.info for entry in manifest.tensors}

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors of the model, here or not."""
        return self._infos

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """A whole tensor's bytes. Raises ModelInvalid if it is not here or shorter than promised."""
        return self.read_range(name, 0, self._infos[name].num_bytes)

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Part of a tensor's bytes. Raises ModelInvalid as ``read``."""
        path = tensor_path(self._folder, name)
        if not path.exists():
            raise ModelInvalid(
                f"tensor '{name}' is not on this node",
                fact="only the layers that the node was told to serve are fetched",
            )
        return read_at(path, offset, num_bytes, what=f"tensor '{name}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingTensor:
    """A tensor that still has to come, and how much of it is here."""

    name: str
    num_bytes: int
    have_bytes: int  # begin fetching here


class ShardWriter:
    """Fills a tensor folder. One process writes a folder at a time; files appear only complete and checked."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder / TENSOR_FOLDER
        self._manifest = manifest
        self._folder.mkdir(parents=True, exist_ok=True)

    @property
    def manifest(self) -> Manifest:
        """What the whole model consists of."""
        return self._manifest

    def missing(self, names: Iterable[str]) -> list[MissingTensor]:
        """Those of the tensors that are not complete here, in order. Raises ModelInvalid for unknown names."""
        entries = [self._entry(name) for name in names]
        return [
            MissingTensor(name=entry.info.name, num_bytes=entry.info.num_bytes, have_bytes=self._have(entry))
            for entry in entries
            if not tensor_path(self._folder, entry.info.name).exists()
        ]

    def open(self, name: str) -> TensorSink:
        """Begin or go on writing a tensor at the sink's ``position``. Raises ModelInvalid for an unknown name."""
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
    """Takes one tensor's bytes in order. A context manager: leaving it keeps an incomplete part for later."""

    def __init__(self, path: Path, entry: TensorEntry) -> None:
        self._path = path
        self._entry = entry
        self._file: BinaryIO = _part_path(path).open("ab+", buffering=0)
        self._digest = hashlib.sha256()
        self.position = 0  # bytes that are here; the next write goes there
        self._take_up()

    def seek(self, offset: int) -> None:
        """Forget what is here behind ``offset``. Raises ModelInvalid if there is a gap before it."""
        if offset > self.position:
            raise ModelInvalid(
                f"tensor '{self._entry.info.name}' cannot go on at byte {offset}",
                fact=f"{self.position} bytes are here",
            )
        if offset < self.position:
            os.ftruncate(self._file.fileno(), offset)
            self._take_up()

    def write(self, chunk: bytes | memoryview) -> None:
        """Append. Raises ModelInvalid if more comes than the manifest promised; all is deleted."""
        if self.position + len(chunk) > self._entry.info.num_bytes:
            self._discard()
            raise self._refused(f"more than the promised {self._entry.info.num_bytes} bytes came")
        self._file.write(chunk)
        self._digest.update(chunk)
        self.position += len(chunk)

    def finish(self) -> bool:
        """Check and put in place; False if bytes are missing. Raises ModelInvalid and deletes if the hash differs."""
        if self.position < self._entry.info.num_bytes:
            return False
        if self._digest.hexdigest() != self._entry.sha256:
            self._discard()
            raise self._refused("its SHA-256 is not the one that the manifest promises")
        os.fsync(self._file.fileno())
        _part_path(self._path).replace(self._path)
        return True

    def close(self) -> None:
        """Let go of the file. May be called twice."""
        self._file.close()

    def __enter__(self) -> TensorSink:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _take_up(self) -> None:
        """Hash what an earlier transfer left."""
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
            f"tensor '{self._entry.info.name}' came damaged",
            fact=fact,
            next_step="it is fetched again, from elsewhere",
        )


def tensor_path(folder: Path, name: str) -> Path:
    """Where a tensor stands; names were checked when the manifest was read."""
    return folder / f"{name}.bin"


def _part_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def complete_names(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of the tensors that are complete in a model's folder."""
    try:
        here = {entry.name for entry in os.scandir(folder / TENSOR_FOLDER)}
    except FileNotFoundError:
        return []
    return [name for name in names if tensor_path(folder, name).name in here]
