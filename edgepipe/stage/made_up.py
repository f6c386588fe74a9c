"""Weights of small random numbers, in any packed form, for measuring a device without a model's files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.spec.layout import model_tensors, slice_weights
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightInfo
from edgepipe.weights.made_up_packed import DEVIATION, made_up_packed
from edgepipe.weights.weight_table import FLOATS, LayerForms, WeightTable, make_table


class MadeUpWeights:
    """A ``WeightSource`` of small random numbers for every weight of a slice, in the forms of a table."""

    bytes_read = 0

    def __init__(self, config: ModelConfig, table: WeightTable = FLOATS) -> None:
        self.config = config
        self._table = table
        self._shapes = model_tensors(config)
        generator = np.random.default_rng(0)
        floats = generator.normal(0, DEVIATION, 1 << 16).astype(np.float32)
        self._floats = (floats.view(np.uint32) >> 16).astype(np.uint16)

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """See ``WeightSource.tensors``: all of them in bf16."""
        return [self._tensor(name) for name in slice_weights(self.config, part)]

    def read(self, name: str) -> StoredTensor:
        """See ``WeightSource.read``."""
        info = self._tensor(name)
        return StoredTensor(info=info, data=np.resize(self._floats, info.num_bytes // 2).view(np.uint8))

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """See ``WeightSource.read_range``."""
        return self.read(name).data[offset : offset + num_bytes]

    def weights(self, part: Slice) -> Sequence[WeightInfo]:
        """See ``WeightSource.weights``."""
        return [self._weight(name) for name in slice_weights(self.config, part)]

    def load(self, name: str) -> StoredTensor | Packed:
        """See ``WeightSource.load``."""
        form, shape = self._table.form(name), self._shapes[name]
        return self.read(name) if form is None else made_up_packed(name, (shape[0], shape[-1]), form)

    def _tensor(self, name: str) -> TensorInfo:
        shape = self._shapes[name]
        return TensorInfo(name=name, shape=shape, scheme="BF16", num_bytes=2 * math.prod(shape))

    def _weight(self, name: str) -> WeightInfo:
        form, shape = self._table.form(name), self._shapes[name]
        size = 2 * math.prod(shape) if form is None else form.num_bytes((shape[0], shape[-1]))
        return WeightInfo(name=name, shape=shape, scheme="random", form=form, num_bytes=size)


def spread(config: ModelConfig, table: WeightTable, wanted: int) -> tuple[tuple[LayerSpec, ...], WeightTable]:
    """Return ``wanted`` layers, of which any first few have a model's kinds of layers in their shares, without windows.

    A kind is a spec with the forms of its weights. Each next layer is of the kind that has got the least of its share.
    """
    shares = Counter(
        (spec.with_attention(window=None), tuple(sorted(table.layer(index).items())))
        for index, spec in enumerate(config.layers)
    )
    taken: Counter[tuple[LayerSpec, LayerForms]] = Counter()
    layers: list[tuple[LayerSpec, LayerForms]] = []
    for count in range(1, wanted + 1):
        due = [(number * count / config.num_layers - taken[kind], kind) for kind, number in shares.items()]
        _, kind = max(due, key=lambda each: each[0])
        taken[kind] += 1
        layers.append(kind)
    forms = make_table([forms for _, forms in layers], embedding=table.embedding, head=table.head)
    return tuple(spec for spec, _ in layers), forms
