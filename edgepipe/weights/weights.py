"""``WeightSource`` for safetensors folders, GGUF files and folders of single tensors; see ``open_weights``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.files.fields import Fields
from edgepipe.files.strict_json import read_json_object
from edgepipe.spec.config import EMULATED_KEY, gguf_config, read_hf_config
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.layout import (
    check_layout,
    slice_tensors,
    slice_weights,
    stored_shapes,
    stores_mtp,
)
from edgepipe.spec.longrope import served_config
from edgepipe.spec.naming import settled_naming
from edgepipe.spec.packed import Packed
from edgepipe.spec.quantisation_config import settle_quantisation
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightInfo
from edgepipe.weights.card import read_card
from edgepipe.weights.gguf_file import open_gguf, read_rope_factors
from edgepipe.weights.gguf_header import is_gguf
from edgepipe.weights.gguf_split import gguf_in, stored_gguf
from edgepipe.weights.manifest import CARD_FILE, read_manifest
from edgepipe.weights.mixes import mix_weights, split_mix
from edgepipe.weights.repacked import RepackedPlace, files_identity, repacked_place
from edgepipe.weights.safetensors_file import open_safetensors, shard_names
from edgepipe.weights.settling import settled, settled_mtp
from edgepipe.weights.stored_head import head_is_embedding, stores_head
from edgepipe.weights.stored_weight import load_weight, weight_info
from edgepipe.weights.tensor_folder import TENSOR_FOLDER, TensorFolder, complete_names

logger = logging.getLogger(__name__)

MIX_KEY = "edgepipe_mix"  # key of an emulated model's config.json: types of the imagined weights


class TensorFiles(Protocol):
    """Tensors of any format, by Hugging Face's name, in logical row order."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        ...

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a whole tensor's bytes. Raises ModelInvalid."""
        ...

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return a part of a tensor's bytes. Raises ModelInvalid."""
        ...


class Weights:
    """The tensors of one model, read lazily; a ``WeightSource``."""

    def __init__(
        self, config: ModelConfig, files: TensorFiles, *, mix: str = "", repacked: RepackedPlace | None = None
    ) -> None:
        """``mix``: types of an emulated model's weights. ``repacked``: where a backend may keep its layout of them."""
        self._mix = mix
        self._repacked = repacked
        self._config = config
        self._files = files
        self._infos = files.infos
        self._bytes_read = 0
        self._counting = Lock()  # read_range is called from several threads

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    def in_context(self, context_tokens: int) -> Weights:
        """Return the same weights, with the config of a served context (0: the model's)."""
        config = served_config(self._config, context_tokens)
        return Weights(config, self._files, mix=self._mix, repacked=self._repacked)

    def holding(self, slices: Sequence[Slice]) -> Weights:
        """Return the same weights, with the config that has the slices' layers (``ModelConfig.holding``)."""
        return Weights(self._config.holding(slices), self._files, mix=self._mix, repacked=self._repacked)

    @property
    def repacked(self) -> RepackedPlace | None:
        """Where a backend may keep repacked weights; None outside the store."""
        return self._repacked

    @property
    def bytes_read(self) -> int:
        """Tensor bytes read so far (headers not counted)."""
        return self._bytes_read

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Descriptions of all tensors in the files, by name."""
        return self._infos

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """Return the tensors that a slice needs, in reading order; empty for an emulated model. Raises ModelInvalid."""
        if not self._infos:
            return ()
        return [self._info(name) for name in slice_tensors(self._config, part)]

    def read(self, name: str) -> StoredTensor:
        """Read one tensor. Raises ModelInvalid if it is missing or its file is too short."""
        info = self._info(name)
        data = self._files.read(name)
        self._count(info.num_bytes)
        return StoredTensor(info=info, data=data)

    def weights(self, part: Slice) -> Sequence[WeightInfo]:
        """Return the weights that a slice computes with, in reading order. Raises ModelInvalid.

        An emulated model describes those of its mix, and has none without a mix.
        """
        if not self._infos:
            return mix_weights(self._config, self._mix, part) if self._mix else ()
        return [weight_info(self._config, self._infos, name) for name in slice_weights(self._config, part)]

    def load(self, name: str) -> StoredTensor | Packed:
        """Read one weight: packed if its info has a form. Raises ModelInvalid."""
        return load_weight(weight_info(self._config, self._infos, name), self._config, self.read)

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Read bytes ``[offset, offset + num_bytes)`` of the result of ``read``. Raises ModelInvalid."""
        info = self._info(name)
        if not 0 <= offset <= offset + num_bytes <= info.num_bytes:
            raise ModelInvalid(
                f"tensor '{name}' has no bytes {offset}-{offset + num_bytes}", fact=f"{info.num_bytes} bytes"
            )
        self._count(num_bytes)
        return self._files.read_range(name, offset, num_bytes)

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self._bytes_read += num_bytes

    def _info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise ModelInvalid(f"tensor '{name}' is missing", fact=f"the model has {len(self._infos)} tensors")
        return self._infos[name]


class NoTensors:
    """Empty set of tensors, for an emulated model."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """An empty mapping."""
        return {}

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Raises ModelInvalid."""
        return self.read_range(name, 0, 0)

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Raises ModelInvalid."""
        raise ModelInvalid(f"an emulated model has no tensor '{name}'", fact="only the emulated backend can serve it")


def open_weights(path: Path) -> Weights:
    """Open a model of the store, a GGUF file, or a folder with ``config.json`` and safetensors.

    Checks that config and tensors agree. Raises ModelInvalid, ArchitectureUnsupported.
    """
    if is_gguf(path):
        return open_gguf_weights(path)
    if not path.is_dir():
        raise ModelInvalid(f"'{path.name}' is not a model", fact="a GGUF file or a folder with config.json is needed")
    return _open_stored(path) if (path / CARD_FILE).is_file() else open_hf_weights(path)


def open_hf_weights(path: Path) -> Weights:
    """Open a folder with ``config.json`` and safetensors. Raises ModelInvalid, ArchitectureUnsupported."""
    config = read_hf_config(path)
    if is_emulated(path):
        return Weights(config, NoTensors(), mix=emulated_mix(path))
    files = open_safetensors(path)
    found, own = settled_layout(config, files.infos), layout_with_head(config, files.infos)
    if own is None:
        return Weights(found, files)
    if head_is_embedding(own, files):
        return Weights(replace(found, tied_embeddings=True), files)
    if found.tied_embeddings:
        logger.warning(
            "%s: the stored lm_head differs from the embedding, although config.json ties them. edgepipe uses the "
            "stored head, as transformers does",
            path.name,
        )
    return Weights(own, files)


def settled_layout(config: ModelConfig, infos: Mapping[str, TensorInfo]) -> ModelConfig:
    """Return the config of a Hugging Face folder as its tensors settle it. Raises ModelInvalid if they contradict."""
    config = replace(config, naming=settled_naming(config.naming, infos))
    config = settled(config, infos)
    if not stores_mtp(config, infos):
        config = replace(config, mtp=None)
    if config.quantisation:
        found = settle_quantisation(config.quantisation, stored_shapes(config.with_mtp()), infos)
        config = replace(config, quantisation=found)
    check_layout(config, infos)
    return settled_mtp(config, infos)


def layout_with_head(config: ModelConfig, infos: Mapping[str, TensorInfo]) -> ModelConfig | None:
    """Return the settled config with a head of its own, if files hold one though their config ties it; else None.

    Raises ModelInvalid if that head contradicts the config.
    """
    named = replace(config, naming=settled_naming(config.naming, infos))
    if not config.tied_embeddings or not stores_head(named, infos):
        return None
    return settled_layout(replace(config, tied_embeddings=False), infos)


def open_gguf_weights(path: Path) -> Weights:
    """Open a GGUF model by its file, or by any part of it. Raises ModelInvalid, ArchitectureUnsupported."""
    joined, files = open_gguf(path)
    config = gguf_config(joined.metadata, joined.shapes, read_rope_factors(path.parent, joined))
    check_layout(config, files.infos)
    if not config.tied_embeddings and head_is_embedding(config, files):
        config = replace(config, tied_embeddings=True)  # one table in memory instead of two
    return Weights(settled_mtp(config, files.infos), files)


def is_emulated(path: Path) -> bool:
    """Return whether a model folder holds only a shape for the emulated backend, without weights."""
    return read_json_object(path / "config.json", infinite=True).get(EMULATED_KEY) is True


def emulated_mix(path: Path) -> str:
    """Return the mix of an emulated model's folder; empty without one. Raises ModelInvalid, ModelUnknown."""
    mix = Fields(read_json_object(path / "config.json", infinite=True), what="'config.json'").text(MIX_KEY, default="")
    return split_mix(f":{mix}")[1] if mix else ""


def _open_stored(path: Path) -> Weights:
    """Open a stored model with the card's config, which has more end tokens, and tensors in any stored form."""
    card = read_card(path)
    if card.emulated:
        return Weights(card.config, NoTensors(), mix=card.mix)
    files = _stored_files(path)
    check_layout(card.config, files.infos)
    return Weights(settled_mtp(card.config, files.infos), files, repacked=_place_beside(path, files))


def _place_beside(path: Path, files: TensorFiles) -> RepackedPlace | None:
    """Return where a stored model's repacked weights may lie. Files in the store change only as a whole."""
    try:
        if (path / TENSOR_FOLDER).is_dir():  # filled tensor by tensor, each checked against the manifest
            present = complete_names(path, list(files.infos))
            source = read_manifest(path).hash
        else:
            present = list(files.infos)
            names = stored_gguf(file.name for file in path.iterdir()) or shard_names(path)
            source = files_identity(path / name for name in (CARD_FILE, *names))
    except OSError:
        return None
    model_bytes = sum(files.infos[name].num_bytes for name in present)
    return repacked_place(path, source=source, model_bytes=model_bytes)


def _stored_files(path: Path) -> TensorFiles:
    if (path / TENSOR_FOLDER).is_dir():
        return TensorFolder(path, read_manifest(path))
    gguf = gguf_in(path)
    if gguf is not None:
        return open_gguf(gguf)[1]
    return open_safetensors(path)
