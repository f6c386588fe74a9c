"""Weights made of stored tensors: their description, and loading them packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from edgepipe.errors import ModelInvalid
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.formats import pack_weight, packed_form, weight_label
from edgepipe.model.gguf_packing import gguf_form, pack_gguf
from edgepipe.model.layout import stored_parts, weight_shape
from edgepipe.model.packed import Packed
from edgepipe.model.quantisation import WeightFormat
from edgepipe.model.tensors import RawTensor, TensorInfo, WeightInfo


def weight_info(config: ModelConfig, infos: Mapping[str, TensorInfo], name: str) -> WeightInfo:
    """Describe a weight by its stored tensors. Raises ModelInvalid if they are missing or disagree."""
    parts = stored_parts(config, name)
    tensors = [_present(infos, part) for part in parts or (name,)]
    if not parts:
        return _single(tensors[0])
    shape, stored = weight_shape(config, name), _format_of(config, name)
    return WeightInfo(
        name=name,
        shape=shape,
        scheme=weight_label(stored),
        form=packed_form(stored, shape),
        num_bytes=sum(info.num_bytes for info in tensors),
    )


def _present(infos: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    info = infos.get(name)
    if info is None:
        raise ModelInvalid(f"tensor '{name}' is missing", fact=f"the model has {len(infos)} tensors")
    return info


def _format_of(config: ModelConfig, name: str) -> WeightFormat:
    stored = config.quantisation.of(name.removesuffix(".weight")) if config.quantisation else None
    assert stored is not None, f"{name} has no stored parts"
    return stored


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


def load_weight(weight: WeightInfo, config: ModelConfig, read: Callable[[str], RawTensor]) -> RawTensor | Packed:
    """Read a weight's stored tensors and pack them. Raises ModelInvalid."""
    parts = stored_parts(config, weight.name)
    if parts:
        module = weight.name.removesuffix("weight")
        tensors = {name.removeprefix(module): read(name) for name in parts}
        return pack_weight(weight.name, weight.shape, _format_of(config, weight.name), tensors)
    raw = read(weight.name)
    return raw if weight.form is None else pack_gguf(raw)


class OneTensorPerWeight(Protocol):
    """The part of a ``WeightSource`` that follows from the other, where every weight is one stored tensor."""

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """See ``WeightSource.tensors``."""
        ...

    def read(self, name: str) -> RawTensor:
        """See ``WeightSource.read``."""
        ...

    def weights(self, part: Slice) -> Sequence[WeightInfo]:
        """See ``WeightSource.weights``."""
        return [_single(info) for info in self.tensors(part)]

    def load(self, name: str) -> RawTensor | Packed:
        """See ``WeightSource.load``."""
        raw = self.read(name)
        return raw if _single(raw.info).form is None else pack_gguf(raw)
