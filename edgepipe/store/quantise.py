"""Make a packed copy of a 16-bit model in the store, tensor by tensor.

The copy is a folder of single tensors in GGUF's simplest types: Q4_1 or Q8_0 for the matrices, Q8_0 for embedding and
head. Vectors stay as stored, and so do matrices whose rows are no multiple of a block.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ConfigInvalid, ModelInvalid
from edgepipe.files.disk import check_room, disk_errors
from edgepipe.files.progress import OnProgress, ProgressCounter
from edgepipe.spec.facts import ModelConfig, whole_slice
from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.spec.layout import EMBEDDING, HEAD, is_expert, model_tensors, shares, stored_names
from edgepipe.spec.names import folder_name
from edgepipe.spec.tensors import TensorInfo
from edgepipe.store.folders import sync_files
from edgepipe.store.install import hash_file, metadata_contents
from edgepipe.store.linked_files import counted
from edgepipe.store.store import ModelStore, StoredModel
from edgepipe.store.unfinished import exclusive_staging, quantising_folder
from edgepipe.weights.dequantise import block_values
from edgepipe.weights.manifest import CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE, FileEntry, Manifest, TensorEntry
from edgepipe.weights.tensor_folder import TENSOR_FOLDER, tensor_path
from edgepipe.weights.weights import Weights

REFERENCE_TEXT = (Path(__file__).parent / "reference_text.txt").read_text(encoding="utf-8")
"""English text of about 4,000 tokens on which copies are compared with their originals."""

TARGETS: Mapping[str, str] = {"q4": "Q4_1", "q8": "Q8_0"}
"""Type of the matrices by the name of the target."""

_TABLE_SCHEME = "Q8_0"  # embedding and head: their errors reach every logit
_BLOCK = 32
_CHUNK_VALUES = 1 << 17  # values that are widened at once
_REFINEMENTS = 4  # further ones lower the error by less than 1 %
_LARGEST = 65504.0  # largest float16, the type of offsets

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCopy:
    """A packed copy and its original."""

    copy: StoredModel
    original: StoredModel
    already_here: bool  # an earlier call made it
    unpacked: tuple[TensorInfo, ...] = ()  # matrices that stay as stored, since blocks do not divide their rows


def copy_id(model_id: str, target: str) -> str:
    """Return the name of a copy: ``org/name-q4``."""
    return f"{model_id.partition(':')[0]}-{target}"


def quantise_model(
    store: ModelStore, model_id: str, target: str, on_progress: OnProgress = lambda _: None
) -> PackedCopy:
    """Write a packed copy of a stored model. An existing copy is kept.

    Raises ModelUnknown, ConfigInvalid for a model that is packed, incomplete, without weights or with rows that no
    block divides, ModelInvalid for
    values that are no numbers and for files that changed, and ModelDownloadFailed if the disk is full. An error leaves
    no files.
    """
    original = store.resolve(store.meant(model_id))
    weights = _float_weights(original)
    new_id = copy_id(original.id, target)
    folder = store.root / folder_name(new_id)
    tensors = list(weights.tensors(whole_slice(weights.config)))  # includes the layer that predicts one token more
    planned, unpacked = _planned(weights.config, tensors, target)
    if folder.exists():
        return PackedCopy(copy=StoredModel(new_id, folder), original=original, already_here=True, unpacked=unpacked)
    if planned == tensors:
        raise ConfigInvalid(
            f"'{original.id}' cannot be quantised",
            fact=f"it has no matrix to pack: {unpacked_text(unpacked)}",
            next_step="use it as it is",
        )
    original.check_unchanged(counted(on_progress))
    staging = quantising_folder(folder)
    with exclusive_staging(staging, new_id):
        made = folder.exists()  # another process may have made it in the meantime
        try:
            if not made:
                check_room(new_id, store.root, sum(info.num_bytes for info in planned))
                with disk_errors(new_id):
                    _empty(staging)
                    entries = _write_tensors(weights, planned, staging / TENSOR_FOLDER, on_progress)
                    original.check_unchanged(counted(on_progress))  # the originals must not change while they are read
                    _describe(original, staging, new_id, entries)
                    sync_files(staging)
                    staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return PackedCopy(copy=StoredModel(new_id, folder), original=original, already_here=made, unpacked=unpacked)


def _float_weights(model: StoredModel) -> Weights:
    """Open a model, with all its layers. Raises ConfigInvalid if no packed copy of it can be made."""
    if model.card.emulated:
        raise ConfigInvalid(
            f"'{model.id}' cannot be quantised",
            fact="it has a shape but no weights",
            next_step="name a model with weights: edgepipe models list",
        )
    weights = model.open_weights()
    part = whole_slice(weights.config.with_mtp())
    if missing := model.missing((part,)):
        raise ConfigInvalid(
            f"'{model.id}' cannot be quantised",
            fact=f"{len(missing)} of its tensors are not on this machine",
            next_step=f"fetch it whole: edgepipe models pull {model.id}",
        )
    weights = weights.holding((part,))
    packed = sorted({info.scheme for info in weights.weights(part) if info.form is not None})
    if packed:
        raise ConfigInvalid(
            f"'{model.id}' is packed already",
            fact=f"its weights are stored as {', '.join(packed)}, and quantising again would lose more than it saves",
            next_step="quantise the 16-bit model, or use this one as it is",
        )
    return weights


def unpacked_text(unpacked: Sequence[TensorInfo]) -> str:
    """Say why matrices stay as they are stored."""
    widths = sorted({info.shape[-1] for info in unpacked})
    return (
        f"the rows of {len(unpacked)} matrices have {', '.join(map(str, widths[:3]))} values, no multiple of {_BLOCK}"
    )


def _planned(
    config: ModelConfig, tensors: Sequence[TensorInfo], target: str
) -> tuple[list[TensorInfo], tuple[TensorInfo, ...]]:
    """Describe the tensors of the copy, and the matrices among them that no block divides.

    Tensors of all experts are [experts, out, in].
    """
    tables = stored_names(config, [EMBEDDING] if config.tied_embeddings else [EMBEDDING, HEAD])
    stacks = {
        name
        for weight in model_tensors(config)
        if is_expert(weight)
        for share in shares(config, weight)
        if not share.transposed
        for name in share.parts
    }
    planned: list[TensorInfo] = []
    unpacked: list[TensorInfo] = []
    for info in tensors:
        is_matrix = len(info.shape) == 2 or (len(info.shape) == 3 and info.name in stacks)
        divides = info.shape[-1] % _BLOCK == 0
        if is_matrix and not divides:
            unpacked.append(info)
        scheme = _TABLE_SCHEME if info.name in tables else TARGETS[target]
        planned.append(_packed(info, scheme) if is_matrix and divides else info)
    return planned, tuple(unpacked)


def _packed(info: TensorInfo, scheme: str) -> TensorInfo:
    """Describe a tensor in a packed scheme."""
    num_bytes = prod(info.shape) // _BLOCK * BLOCKS_BY_NAME[scheme].block_bytes
    return replace(info, scheme=scheme, num_bytes=num_bytes, rounded=True)


def _empty(staging: Path) -> None:
    """Remove files of a killed process, and make the folder of the tensors."""
    for path in staging.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (staging / TENSOR_FOLDER).mkdir()


def _write_tensors(
    weights: Weights, planned: list[TensorInfo], folder: Path, on_progress: OnProgress
) -> tuple[TensorEntry, ...]:
    counter = ProgressCounter(on_progress, "quantise", sum(weights.infos[info.name].num_bytes for info in planned))
    entries: list[TensorEntry] = []
    for info in planned:
        digest = hashlib.sha256()
        with tensor_path(folder, info.name).open("xb") as file:
            for chunk, taken_bytes in _chunks(weights, info):
                file.write(chunk.data)
                digest.update(chunk.data)
                counter.add(info.name, taken_bytes)
        entries.append(TensorEntry(info=info, sha256=digest.hexdigest()))
    return tuple(entries)


def _chunks(weights: Weights, info: TensorInfo) -> Iterator[tuple[npt.NDArray[np.uint8], int]]:
    """Yield a tensor of the copy in pieces: its bytes, and the number of bytes read for them."""
    stored = weights.infos[info.name]
    if stored.scheme == info.scheme:
        yield weights.read(info.name).data, stored.num_bytes
        return
    value_bytes = BLOCKS_BY_NAME[stored.scheme].block_bytes
    step = max(1, _CHUNK_VALUES // info.shape[-1]) * info.shape[-1] * value_bytes
    for start in range(0, stored.num_bytes, step):
        data = weights.read_range(info.name, start, min(step, stored.num_bytes - start))
        values = block_values(stored.scheme, data.reshape(-1, value_bytes)).reshape(-1, _BLOCK)
        if not bool((np.abs(values) <= _LARGEST).all()):
            raise ModelInvalid(
                f"tensor '{info.name}' cannot be quantised", fact=f"a value is no number, or above {_LARGEST:.0f}"
            )
        yield _QUANTISERS[info.scheme](values).reshape(-1), data.nbytes


def quantise_q8_0(values: Floats) -> npt.NDArray[np.uint8]:
    """Quantise groups [N, 32] to Q8_0 blocks [N, 34]: the largest magnitude gets level 127."""
    scale = (np.abs(values).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float16)
    levels = np.clip(np.rint(values * _inverse(scale.astype(np.float32))), -127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), levels.view(np.uint8)], axis=1)


def quantise_q4_1(values: Floats) -> npt.NDArray[np.uint8]:
    """Quantise groups [N, 32] to Q4_1 blocks [N, 20].

    Starts with the levels between minimum and maximum. Then alternates the least-squares line through the values for
    given levels and the nearest levels for a given line, as Lloyd's algorithm does; both only lower the squared error.
    """
    offset: Floats = values.min(axis=1, keepdims=True)
    scale: Floats = (values.max(axis=1, keepdims=True) - offset) / np.float32(15)
    mean = values.mean(axis=1, keepdims=True)
    for _ in range(_REFINEMENTS):
        levels = _levels(values, scale, offset)
        middle = levels.mean(axis=1, keepdims=True)
        levels -= middle
        spread = np.square(levels).sum(axis=1, keepdims=True)
        joint = (levels * values).sum(axis=1, keepdims=True)
        scale = np.where(spread > 0, joint * _inverse(spread), scale)
        offset = mean - scale * middle
    stored_scale, stored_offset = scale.astype(np.float16), offset.astype(np.float16)
    codes = _levels(values, stored_scale.astype(np.float32), stored_offset.astype(np.float32)).astype(np.uint8)
    quants = codes[:, :16] | (codes[:, 16:] << np.uint8(4))
    return np.concatenate([stored_scale.view(np.uint8), stored_offset.view(np.uint8), quants], axis=1)


_QUANTISERS: Mapping[str, Callable[[Floats], npt.NDArray[np.uint8]]] = {"Q4_1": quantise_q4_1, "Q8_0": quantise_q8_0}


def _levels(values: Floats, scale: Floats, offset: Floats) -> Floats:
    return np.clip(np.rint((values - offset) * _inverse(scale)), 0, 15)


def _inverse(values: Floats) -> Floats:
    """Return 1 / x, and 0 for 0."""
    with np.errstate(divide="ignore"):
        return np.where(values != 0, 1 / values, 0).astype(np.float32)


def _describe(original: StoredModel, staging: Path, model_id: str, tensors: tuple[TensorEntry, ...]) -> None:
    """Add card, tokenizer and manifest to the copy's folder."""
    (staging / CARD_FILE).write_bytes(original.card.to_json())
    if original.tokenizer_path.is_file():
        shutil.copyfile(original.tokenizer_path, staging / TOKENIZER_FILE)
    files = tuple(
        FileEntry(
            name=name,
            num_bytes=(staging / name).stat().st_size,
            sha256=hash_file(staging / name),
            metadata=True,
            content=content,
        )
        for name, content in metadata_contents(staging).items()
    )
    manifest = Manifest(model_id=model_id, source=f"quantised:{original.id}", tensors=tensors, files=files)
    (staging / MANIFEST_FILE).write_bytes(manifest.to_json())
