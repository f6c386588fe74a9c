"""Weights made of stored tensors: their description, and reading them packed or as floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.formats import pack_weight, packed_form, weight_label
from edgepipe.spec.layout import Share, is_stored_tensor, shares, weight_shape
from edgepipe.spec.packed import Packed, concatenate
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightInfo, WeightSource
from edgepipe.weights.dequantise import as_bf16_bits, as_float32
from edgepipe.weights.gguf_packing import checked_row_bytes, gguf_form, pack_gguf

Rows = slice | npt.NDArray[np.int64]
"""Some rows of a weight: a range with both ends, or their numbers in order."""


class StoredWeight:
    """A weight that is still in its files. Backends read it in the form that their products take.

    ``packed`` and ``floats`` stay until the object goes, so that a weight with two places is read once. The methods
    keep nothing.
    """

    def __init__(self, source: WeightSource, info: WeightInfo, tensor: TensorInfo | None) -> None:
        """``info``: without its form for a weight that becomes floats.

        ``tensor``: the one with the weight's name and values, all rows in order and unchanged, if there is one.
        """
        self.info = info
        self.blocks = tensor if tensor is not None and tensor.scheme == info.scheme else None  # see ``read_range``
        self._source = source
        self._tensor = tensor

    def without_form(self) -> StoredWeight:
        """Return the same weight, which becomes floats."""
        return StoredWeight(self._source, replace(self.info, form=None), self._tensor)

    @cached_property
    def packed(self) -> Packed:
        """See ``read_packed``."""
        return self.read_packed()

    @cached_property
    def floats(self) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
        """See ``read_floats``. The array can be written."""
        found = self.read_floats()
        return found if found.flags.writeable else found.copy()

    @property
    def is_read(self) -> bool:
        """Whether ``packed`` is in memory already."""
        return "packed" in self.__dict__

    def read_packed(self) -> Packed:
        """Read the packed weight [O, I]. Raises ModelInvalid."""
        loaded = self._source.load(self.info.name)
        assert isinstance(loaded, Packed), f"{self.info.name} has a form"
        return loaded

    def read_floats(self) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
        """Read the values in the weight's shape: bits of bf16 where it holds them, else float32. Raises ModelInvalid.

        A weight with a form has the values of ``packed``. Without its form, it is rounded to bf16 if ``info`` says so.
        """
        rounds = self.info.form is None and self.info.is_bf16
        return self.read_bf16() if rounds else as_float32(self._values())

    def read_bf16(self) -> npt.NDArray[np.uint16]:
        """Read the values, rounded to bf16, as its bits. Raises ModelInvalid."""
        return as_bf16_bits(self._values())

    def packed_rows(self, rows: Rows | None) -> Packed:
        """Return rows of the packed weight; a range of ``blocks`` is read alone. Raises ModelInvalid."""
        if rows is None:
            return self.packed
        if not isinstance(rows, slice) or self.blocks is None or self.is_read:
            return self.packed.rows(rows)
        row_bytes, count = checked_row_bytes(self.blocks), rows.stop - rows.start
        num_bytes = count * row_bytes
        info = replace(self.blocks, shape=(count, *self.info.shape[1:]), num_bytes=num_bytes)
        return pack_gguf(StoredTensor(info=info, data=self.read_range(rows.start * row_bytes, num_bytes)))

    def read_range(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Read a part of the bytes of ``blocks``. Several threads may do so at once. Raises ModelInvalid."""
        return self._source.read_range(self.info.name, offset, num_bytes)

    def _values(self) -> StoredTensor | Packed:
        """Read what floats are made of. A type that ``Packed`` only approximates keeps its values as a whole tensor."""
        if self.info.form is None and self._tensor is not None:
            return self._source.read(self.info.name)
        return self._source.load(self.info.name)


def stored_weights(source: WeightSource, part: Slice) -> Iterator[StoredWeight]:
    """Yield the weights of a slice, in reading order. Raises ModelInvalid."""
    tensors = {tensor.name: tensor for tensor in source.tensors(part)}
    for info in source.weights(part):
        tensor = tensors.get(info.name)
        same = tensor is not None and tensor.shape == info.shape and is_stored_tensor(source.config, info.name)
        yield StoredWeight(source, info, tensor if same else None)


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
