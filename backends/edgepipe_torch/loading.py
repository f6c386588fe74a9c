"""Load weights from a source into a slice, one tensor at a time; each raw tensor is freed before the next is read.

Merged and tiled storage is allocated first and filled in place, so no weight is held twice. Packed weights stay packed,
or are widened to the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from edgepipe.backend.types import LoadProgress
from edgepipe.errors import ArchitectureUnsupported, ModelInvalid
from edgepipe.model.dequantise import as_bf16_bits, as_float32, round_to_bf16
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.layout import EMBEDDING, FINAL_NORM, HEAD
from edgepipe.model.packed import Packed
from edgepipe.model.tensors import RawTensor, TensorInfo, WeightInfo, WeightSource
from edgepipe_torch.decoder import Layer, SliceWeights
from edgepipe_torch.linear import (
    HalfLinear,
    Linear,
    PackedLinear,
    PlainLinear,
    Table,
    TiledLinear,
    Workspace,
    half_works,
)
from edgepipe_torch.packed_cpu import PackedCpuLinear

Sink = Callable[[Tensor | Packed], None]


class SliceBuilder:
    """Empty storage for a slice, with the destination of each named tensor."""

    def __init__(
        self,
        config: ModelConfig,
        part: Slice,
        infos: Sequence[WeightInfo],
        *,
        dtype: torch.dtype,
        device: torch.device,
        workspace: Workspace,
        packed: bool = True,
    ) -> None:
        """``infos``: the weights to load. ``packed``: those with a form stay packed. Raises ArchitectureUnsupported."""
        if config.head_dim % 2:
            raise ArchitectureUnsupported("an odd head dimension cannot be rotated", fact=f"it is {config.head_dim}")
        self._config = config
        self._dtype = dtype
        self._device = device
        self._workspace = workspace
        self._packed = packed and (device.type == "cuda" or dtype == torch.float32)
        self._infos = {info.name: info for info in infos}
        self._sinks: dict[str, list[Sink]] = {}
        self._unfinished: list[tuple[set[str], Linear]] = []  # missing names, product
        layers = [self._layer(index) for index in part.layers]
        head = self._head() if part.head else None
        self.weights = SliceWeights(
            part=part,
            layers=layers,
            embedding=self._embedding(head) if part.embedding else None,
            final_norm=self._vector(FINAL_NORM, config.hidden_size) if part.head else None,
            head=head,
        )

    def take(self, name: str, tensor: Tensor | Packed) -> None:
        """Copy a host tensor or a packed weight to its destination.

        Raises ModelInvalid for an unknown name or a wrong shape.
        """
        if name not in self._sinks:
            raise ModelInvalid(f"tensor '{name}' does not belong to the slice")
        try:
            for sink in self._sinks[name]:
                sink(tensor)
        except RuntimeError as exc:
            raise ModelInvalid(
                f"tensor '{name}' does not fit the config", fact=f"its shape is {list(tensor.shape)}: {exc}"
            ) from exc
        self._finish(name)

    @property
    def packed(self) -> bool:
        """Whether weights with a form stay packed."""
        return self._packed

    def _finish(self, name: str) -> None:
        """Finish the products for which this was the last tensor, before the next tensor is read."""
        for missing, linear in self._unfinished:
            missing.discard(name)
            if not missing:
                linear.finish()
        self._unfinished = [entry for entry in self._unfinished if entry[0]]

    def _layer(self, index: int) -> Layer:
        config, prefix = self._config, f"model.layers.{index}."
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        norm = config.head_dim if config.qk_norm else None
        return Layer(
            input_norm=self._vector(prefix + "input_layernorm.weight", hidden),
            qkv=self._linear(
                [
                    (prefix + "self_attn.q_proj", query, True),
                    (prefix + "self_attn.k_proj", key, True),
                    (prefix + "self_attn.v_proj", key, False),
                ],
                hidden,
            ),
            query_norm=self._vector(prefix + "self_attn.q_norm.weight", norm, pairs=True) if norm else None,
            key_norm=self._vector(prefix + "self_attn.k_norm.weight", norm, pairs=True) if norm else None,
            output=self._linear([(prefix + "self_attn.o_proj", hidden, False)], query),
            post_norm=self._vector(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._linear(
                [(prefix + "mlp.gate_proj", inner, False), (prefix + "mlp.up_proj", inner, False)], hidden
            ),
            down=self._linear([(prefix + "mlp.down_proj", hidden, False)], inner),
            window=config.window(index),
        )

    def _head(self) -> Linear:
        name = EMBEDDING if self._config.tied_embeddings else HEAD
        return self._merged("head", [(name, "", self._config.vocab_size, False)], self._config.hidden_size)

    def _embedding(self, head: Linear | None) -> Tensor | Table:
        if self._config.tied_embeddings and isinstance(head, TiledLinear | PlainLinear | PackedLinear):
            return head
        info = self._infos.get(EMBEDDING)
        if self._packed and info is not None and info.form is not None:
            table = self._merged(
                "embedding", [(EMBEDDING, "", self._config.vocab_size, False)], self._config.hidden_size
            )
            assert isinstance(table, PackedLinear)
            return table
        dtype = self._dtype
        if dtype == torch.float32:  # ``take`` widens rows
            dtype = torch.bfloat16 if info and _is_bf16(info) else dtype
        rows = torch.empty(self._config.vocab_size, self._config.hidden_size, dtype=dtype, device=self._device)
        self._send(EMBEDDING, lambda tensor: _copy(rows, _floats(tensor)))
        return rows

    def _linear(self, parts: Sequence[tuple[str, int, bool]], in_features: int) -> Linear:
        """Make a product from parts: name without suffix, out features, whether its rows become rotary pairs."""
        named = [(f"{name}.weight", f"{name}.bias", size, pairs) for name, size, pairs in parts]
        return self._merged(parts[0][0].rsplit(".", 1)[1], named, in_features)

    def _merged(self, role: str, parts: Sequence[tuple[str, str, int, bool]], in_features: int) -> Linear:
        names = {name for weight, bias, _size, _pairs in parts for name in (weight, bias) if name in self._infos}
        sizes = [size for _weight, _bias, size, _pairs in parts]
        linear = self._new_linear(role, in_features, sizes, names, [weight for weight, _bias, _size, _pairs in parts])
        for index, (weight, bias, size, pairs) in enumerate(parts):
            self._send(weight, self._part_sink(linear, index, (size, in_features), pairs=pairs))
            self._send(bias, self._bias_sink(linear, index, size, pairs=pairs))
        self._unfinished.append((names, linear))
        return linear

    def _new_linear(
        self, role: str, in_features: int, sizes: Sequence[int], names: set[str], weights: Sequence[str]
    ) -> Linear:
        """Choose the class. ``names``: of weights and biases; ``weights``: of the parts, in order."""
        forms = [self._infos[name].form if name in self._infos else None for name in weights]
        if self._packed and any(forms):
            if self._device.type == "cpu":
                return PackedCpuLinear(role, in_features, sizes, self._workspace)
            from edgepipe_torch.packed_cuda import PackedCudaLinear

            return PackedCudaLinear(in_features, sizes, forms, dtype=self._dtype, device=self._device)
        if self._device.type != "cpu" or self._dtype != torch.float32:
            return PlainLinear(in_features, sizes, dtype=self._dtype, device=self._device)
        exact = all(_is_half(self._infos[name]) for name in names)
        kind = HalfLinear if exact and half_works() else TiledLinear
        return kind(role, in_features, sizes, self._workspace)

    def _part_sink(self, linear: Linear, index: int, shape: tuple[int, int], *, pairs: bool) -> Sink:
        def sink(weight: Tensor | Packed) -> None:
            if tuple(weight.shape) != shape:
                raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
            order = self._pair_order(shape[0]) if pairs else None
            if isinstance(weight, Packed):
                assert isinstance(linear, PackedLinear)
                linear.fill_packed(index, weight if order is None else weight.rows(order.numpy()))
            else:
                linear.fill(index, weight if order is None else weight[order])

        return sink

    def _bias_sink(self, linear: Linear, index: int, size: int, *, pairs: bool) -> Sink:
        def sink(bias: Tensor | Packed) -> None:
            if tuple(bias.shape) != (size,):
                raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
            values = _floats(bias)
            linear.fill_bias(index, values[self._pair_order(size)] if pairs else values)

        return sink

    def _vector(self, name: str, size: int, *, pairs: bool = False) -> Tensor:
        vector = torch.empty(size, dtype=self._dtype, device=self._device)
        order = self._pair_order(size) if pairs else slice(None)
        self._send(name, lambda tensor: _copy(vector, _floats(tensor)[order]))
        return vector

    def _send(self, name: str, sink: Sink) -> None:
        self._sinks.setdefault(name, []).append(sink)

    def _pair_order(self, rows: int) -> Tensor:
        """Return the order (head, pair, half) of rows (head, half, pair), so that rotary pairs are adjacent."""
        half = self._config.head_dim // 2
        return torch.arange(rows).view(-1, 2, half).transpose(1, 2).reshape(-1)


def load_slices(
    slices: Sequence[Slice],
    source: WeightSource,
    progress: Callable[[LoadProgress], None],
    *,
    dtype: torch.dtype,
    device: torch.device,
    workspace: Workspace,
    packed: bool = True,
) -> list[SliceWeights]:
    """Read every slice's weights; ``packed``: weights stay packed where the device can compute so.

    Raises ModelInvalid, ArchitectureUnsupported, and torch's memory errors.
    """
    todo = [(part, info) for part in slices for info in source.weights(part)]
    total_bytes = sum(info.num_bytes for _part, info in todo)
    done, done_bytes = 0, 0
    loaded: list[SliceWeights] = []
    for part in slices:
        infos = source.weights(part)
        stored = {(info.name, info.scheme) for info in source.tensors(part)}
        builder = SliceBuilder(
            source.config, part, infos, dtype=dtype, device=device, workspace=workspace, packed=packed
        )
        for info in infos:
            whole = (info.name, info.scheme) in stored
            builder.take(info.name, _host_weight(source, info, packed=builder.packed, stored=whole))
            done, done_bytes = done + 1, done_bytes + info.num_bytes
            progress(
                LoadProgress(tensors_done=done, tensors_total=len(todo), bytes_done=done_bytes, bytes_total=total_bytes)
            )
        loaded.append(builder.weights)
    return loaded


def _host_weight(source: WeightSource, info: WeightInfo, *, packed: bool, stored: bool) -> Tensor | Packed:
    """Read a weight: packed if it has a form and may stay so, else as floats. ``stored``: it is one stored tensor."""
    if not packed and stored:
        return host_tensor(source.read(info.name))
    weight = source.load(info.name)
    if isinstance(weight, RawTensor):
        return host_tensor(weight)
    return weight if packed else _widened(weight, rounded=info.rounded)


def _widened(weight: Packed, *, rounded: bool) -> Tensor:
    """Return a packed weight's values: float32, or bf16 if ``rounded``."""
    values = weight.float32()
    if not rounded:
        return torch.from_numpy(values)
    return torch.from_numpy(round_to_bf16(values).view(np.int16)).view(torch.bfloat16)


def host_tensor(raw: RawTensor) -> Tensor:
    """Return the tensor in its logical shape: bf16 if exact (half the bytes), else float32."""
    if _is_bf16(raw.info):
        bits = as_bf16_bits(raw)
        return torch.from_numpy(bits.view("<i2") if bits.flags.writeable else bits.view("<i2").copy()).view(
            torch.bfloat16
        )
    values = as_float32(raw)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _is_bf16(info: TensorInfo | WeightInfo) -> bool:
    """Return whether bf16 holds the tensor's values exactly."""
    return info.rounded or info.scheme == "BF16"


def _is_half(info: WeightInfo) -> bool:
    """Return whether fp16 holds the values to the precision of a float32 product; see HalfLinear."""
    return _is_bf16(info) or info.scheme == "F16"


def _floats(weight: Tensor | Packed) -> Tensor:
    return torch.from_numpy(weight.float32()) if isinstance(weight, Packed) else weight


def _copy(target: Tensor, source: Tensor) -> None:
    if target.shape != source.shape:
        raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
    target.copy_(source)
