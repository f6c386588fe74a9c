"""Weights made of stored tensors: their description, and loading them packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.formats import pack_weight, packed_form, weight_label
from edgepipe.spec.layout import Share, shares, weight_shape
from edgepipe.spec.packed import Packed, concatenate
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightInfo
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.gguf_packing import gguf_form, pack_gguf


def weight_info(config: ModelConfig, infos: Mapping[str, TensorInfo], name: str) -> WeightInfo:
    """Describe a weight by its stored tensors. Raises ModelInvalid if they are missing or disagree."""
    described = [_share_info(share, infos, name) for share in shares(config, name)]
    first = described[0]
    kinds = {(info.scheme, info.form) for info in described}
    if len(kinds) > 1:
        raise ModelInvalid(
            f"the experts of '{name}' are stored in different formats",
            fact=", ".join(sorted({info.scheme for info in described})),
            next_step="pull another quantisation of the model",
        )
    return replace(first, shape=weight_shape(config, name), num_bytes=sum(info.num_bytes for info in described))


def _share_info(share: Share, infos: Mapping[str, TensorInfo], weight: str) -> WeightInfo:
    tensors = [_present(infos, part) for part in share.parts]
    num_bytes = sum(info.num_bytes for info in tensors) * share.shape[0] // share.whole[0]
    if share.stored is None:
        scheme = "F32" if share.exponential else tensors[0].scheme
        single = replace(tensors[0], shape=share.shape, scheme=scheme)
        return replace(_single(single), name=weight, num_bytes=num_bytes)
    return WeightInfo(
        name=weight,
        shape=share.shape,
        scheme=weight_label(share.stored),
        form=packed_form(share.stored, share.whole),
        num_bytes=num_bytes,
    )


def _present(infos: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    info = infos.get(name)
    if info is None:
        raise ModelInvalid(f"tensor '{name}' is missing", fact=f"the model has {len(infos)} tensors")
    return info


def _single(info: TensorInfo) -> WeightInfo:
    """Describe a weight that is one stored tensor."""
    return WeightInfo(
        name=info.name,
        shape=info.shape,
        scheme=info.scheme,
        form=gguf_form(info.scheme) if len(info.shape) == 2 else None,
        num_bytes=info.num_bytes,
        rounded=info.rounded,
    )


def load_weight(weight: WeightInfo, config: ModelConfig, read: Callable[[str], StoredTensor]) -> StoredTensor | Packed:
    """Read a weight's stored tensors and pack them. Raises ModelInvalid."""
    loaded = [_load_share(share, weight, read) for share in shares(config, weight.name)]
    if len(loaded) == 1:
        return loaded[0]
    packed = [part for part in loaded if isinstance(part, Packed)]
    if packed:
        return _joined(packed)
    floats = [part for part in loaded if isinstance(part, StoredTensor)]
    info = TensorInfo(
        name=weight.name,
        shape=weight.shape,
        scheme=weight.scheme,
        num_bytes=weight.num_bytes,
        rounded=weight.rounded,
    )
    return StoredTensor(info=info, data=np.concatenate([part.data for part in floats]))


def _load_share(share: Share, weight: WeightInfo, read: Callable[[str], StoredTensor]) -> StoredTensor | Packed:
    if share.stored is not None:
        start = len(share.module) + 1
        packed = pack_weight(weight.name, share.whole, share.stored, {name[start:]: read(name) for name in share.parts})
        return packed if share.cut is None else packed.rows(share.cut.indices())
    raw = _own_rows(share, read(next(iter(share.parts))))
    if share.exponential:
        return _logarithms(raw)
    return raw if weight.form is None else pack_gguf(raw)


def _own_rows(share: Share, raw: StoredTensor) -> StoredTensor:
    """Return the rows of a stored tensor that are a weight's, [out, in] as floats or GGUF's blocks."""
    data = raw.data
    if share.transposed:
        count, inputs, outputs = raw.info.shape
        each = np.dtype(f"V{data.size // (count * inputs * outputs)}")
        data = np.ascontiguousarray(data.view(each).reshape(count, inputs, outputs).swapaxes(1, 2)).view(np.uint8)
    if share.cut is not None:
        data = data.reshape(share.cut.rows, -1)[share.cut.indices()]
    info = replace(raw.info, shape=share.shape, num_bytes=data.size)
    return StoredTensor(info=info, data=data.reshape(-1))


def _logarithms(raw: StoredTensor) -> StoredTensor:
    """Return ``log(-v)`` of a tensor's values in F32. Raises ModelInvalid for values that are not below 0."""
    values = as_float32(raw)
    if not (values < 0).all():
        raise ModelInvalid(f"weight '{raw.info.name}' cannot be read", fact="its decays are not all below 0")
    found = np.log(-values.astype(np.float64)).astype(np.float32)
    return StoredTensor(info=replace(raw.info, scheme="F32", num_bytes=found.nbytes), data=found.view(np.uint8))


def _joined(parts: Sequence[Packed]) -> Packed:
    try:
        return concatenate(parts)
    except ValueError as exc:
        raise ModelInvalid(
            f"the experts of '{parts[0].name}' cannot be joined",
            fact="they are stored in different forms, or in different orders of columns",
        ) from exc


class OneTensorPerWeight(Protocol):
    """The part of a ``WeightSource`` that follows from the other, where every weight is one stored tensor."""

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """See ``WeightSource.tensors``."""
        ...

    def read(self, name: str) -> StoredTensor:
        """See ``WeightSource.read``."""
        ...

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """See ``WeightSource.read_range``."""
        return self.read(name).data[offset : offset + num_bytes]

    def weights(self, part: Slice) -> Sequence[WeightInfo]:
        """See ``WeightSource.weights``."""
        return [_single(info) for info in self.tensors(part)]

    def load(self, name: str) -> StoredTensor | Packed:
        """See ``WeightSource.load``."""
        raw = self.read(name)
        return raw if _single(raw.info).form is None else pack_gguf(raw)
