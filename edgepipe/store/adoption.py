"""Adopts a peer's metadata files into the store: streams them to disk and accepts them only if they match the hash.

::

    .adopting-NAME@HASH-1a2b3c4d/     while files arrive; deleted unless ``finish`` accepts them
    NAME@HASH/                        a model without tensors, as ``tensor_folder.py`` describes it
        adopted-for                   id of the node that announced it; missing for the user's own models
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import time
from pathlib import Path
from typing import BinaryIO

from edgepipe.errors import ModelInvalid
from edgepipe.spec.layout import check_layout
from edgepipe.store.folders import sync_files
from edgepipe.store.install import metadata_contents
from edgepipe.weights.card import read_card
from edgepipe.weights.manifest import CARD_FILE, MANIFEST_FILE, FileEntry, Manifest, read_manifest
from edgepipe.weights.tensor_folder import TENSOR_FOLDER

ADOPTED_FOR_FILE = "adopted-for"

_PREFIX = ".adopting-"
_LEFT_OVER_S = 3600.0  # an adoption ends within minutes; a killed process left any older folder


class Adoption:
    """A model's folder while its metadata arrives. A context manager: deletes everything not accepted."""

    def __init__(self, folder: Path, manifest: Manifest, *, adopted_for: str) -> None:
        """``folder``: the model's final folder; ``adopted_for``: a node's id, empty for this node's own user."""
        self._folder = folder
        self._manifest = manifest
        self._adopted_for = adopted_for
        self._staging = folder.with_name(f"{_PREFIX}{folder.name}-{secrets.token_hex(4)}")

    def open(self, entry: FileEntry) -> MetadataSink:
        """Start writing one of the manifest's metadata files."""
        return MetadataSink(self._staging / entry.name, entry)

    def finish(self) -> None:
        """Check the files and move them into place. Raises ModelInvalid if they do not match the manifest's hash."""
        self._check()
        (self._staging / TENSOR_FOLDER).mkdir()
        (self._staging / MANIFEST_FILE).write_bytes(self._manifest.to_json())
        if self._adopted_for:
            (self._staging / ADOPTED_FOR_FILE).write_text(self._adopted_for, encoding="utf-8")
        sync_files(self._staging)
        if not is_model_folder(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)  # remains of a killed process
            self._staging.rename(self._folder)
        elif not self._holds_manifest():
            self._mend()

    def _check(self) -> None:
        promised = {entry.name: entry.content for entry in self._manifest.metadata_files}
        if CARD_FILE not in promised:
            raise ModelInvalid(f"the peer's model has no '{CARD_FILE}'")
        card = read_card(self._staging)
        if card.emulated and self._manifest.tensors:
            raise ModelInvalid(
                "the weights contradict the model's config", fact="a model without weights lists tensors"
            )
        if not card.emulated:
            check_layout(card.config, {entry.info.name: entry.info for entry in self._manifest.tensors})
        contents = metadata_contents(self._staging)
        if contents != promised:
            other = sorted(name for name in promised if contents.get(name) != promised[name])
            raise ModelInvalid(f"'{', '.join(other)}' does not match the model's hash")

    def _holds_manifest(self) -> bool:
        """Return whether the folder in place is readable and has the manifest's content."""
        try:
            read_card(self._folder)
            return read_manifest(self._folder).hash == self._manifest.hash
        except ModelInvalid:
            return False

    def _mend(self) -> None:
        """Replace metadata that a power cut damaged; keep the tensors, each of which was checked and flushed."""
        (self._staging / TENSOR_FOLDER).rmdir()
        (self._folder / TENSOR_FOLDER).mkdir(exist_ok=True)
        for path in self._staging.iterdir():
            path.replace(self._folder / path.name)

    def __enter__(self) -> Adoption:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_overs(self._folder.parent)
        self._staging.mkdir()
        return self

    def __exit__(self, *exc_info: object) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)


class MetadataSink:
    """Writes one file's bytes in order. A context manager that closes the file."""

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self._entry = entry
        self._file: BinaryIO = path.open("xb", buffering=0)
        self._digest = hashlib.sha256()
        self._position = 0

    def write(self, chunk: bytes | memoryview) -> None:
        """Append bytes. Raises ModelInvalid for more bytes than the manifest promised."""
        self._position += len(chunk)
        if self._position > self._entry.num_bytes:
            raise self._damaged(f"more than the promised {self._entry.num_bytes} bytes arrived")
        self._file.write(chunk)
        self._digest.update(chunk)

    def finish(self) -> None:
        """Check length and hash. Raises ModelInvalid if they differ from the manifest."""
        if self._position < self._entry.num_bytes:
            raise self._damaged(f"{self._position} of {self._entry.num_bytes} bytes arrived")
        if self._digest.hexdigest() != self._entry.sha256:
            raise self._damaged("its SHA-256 differs from the promised one")

    def __enter__(self) -> MetadataSink:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def _damaged(self, fact: str) -> ModelInvalid:
        return ModelInvalid(f"'{self._entry.name}' arrived damaged", fact=fact)


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder holds a model, whole or in part."""
    return (folder / CARD_FILE).is_file() and (folder / MANIFEST_FILE).is_file()


def _remove_left_overs(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        try:
            age_s = time.time() - path.stat().st_mtime
        except OSError:
            continue  # another process removed it
        if age_s > _LEFT_OVER_S:
            shutil.rmtree(path, ignore_errors=True)
