"""Load weights from a source into a slice, one tensor at a time; each raw tensor is freed before the next is read.

Merged and tiled storage is allocated first and filled in place, so no weight is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from edgepipe.backend.types import LoadProgress
from edgepipe.errors import ArchitectureUnsupported, ModelInvalid
from edgepipe.model.dequantise import as_bf16_bits, as_float32
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.layout import EMBEDDING, FINAL_NORM, HEAD
from edgepipe.model.tensors import RawTensor, TensorInfo, WeightSource
from edgepipe_torch.decoder import Layer, SliceWeights
from edgepipe_torch.linear import HalfLinear, Linear, PlainLinear, Table, TiledLinear, Workspace, half_works

Sink = Callable[[Tensor], None]
Change = Callable[[Tensor], Tensor]


class SliceBuilder:
    """Empty storage for a slice, with the destination of each named tensor."""

    def __init__(
        self,
        config: ModelConfig,
        part: Slice,
        infos: Sequence[TensorInfo],
        *,
        dtype: torch.dtype,
        device: torch.device,
        workspace: Workspace,
    ) -> None:
        """``infos``: the tensors to load. Raises ArchitectureUnsupported."""
        if config.head_dim % 2:
            raise ArchitectureUnsupported("an odd head dimension cannot be rotated", fact=f"it is {config.head_dim}")
        self._config = config
        self._dtype = dtype
        self._device = device
        self._workspace = workspace
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

    def take(self, name: str, tensor: Tensor) -> None:
        """Copy a host tensor to its destination. Raises ModelInvalid for an unknown name or a wrong shape."""
        if name not in self._sinks:
            raise ModelInvalid(f"tensor '{name}' does not belong to the slice")
        try:
            for sink in self._sinks[name]:
                sink(tensor)
        except RuntimeError as exc:
            raise ModelInvalid(
                f"tensor '{name}' does not fit the config", fact=f"its shape is {list(tensor.shape)}"
            ) from exc
        self._finish(name)

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
        pairs = self._as_pairs
        norm = config.head_dim if config.qk_norm else None
        return Layer(
            input_norm=self._vector(prefix + "input_layernorm.weight", hidden),
            qkv=self._linear(
                [
                    (prefix + "self_attn.q_proj", query, pairs),
                    (prefix + "self_attn.k_proj", key, pairs),
                    (prefix + "self_attn.v_proj", key, None),
                ],
                hidden,
            ),
            query_norm=self._vector(prefix + "self_attn.q_norm.weight", norm, pairs) if norm else None,
            key_norm=self._vector(prefix + "self_attn.k_norm.weight", norm, pairs) if norm else None,
            output=self._linear([(prefix + "self_attn.o_proj", hidden, None)], query),
            post_norm=self._vector(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._linear(
                [(prefix + "mlp.gate_proj", inner, None), (prefix + "mlp.up_proj", inner, None)], hidden
            ),
            down=self._linear([(prefix + "mlp.down_proj", hidden, None)], inner),
            window=config.window(index),
        )

    def _head(self) -> Linear:
        name = EMBEDDING if self._config.tied_embeddings else HEAD
        return self._merged("head", [(name, "", self._config.vocab_size, None)], self._config.hidden_size)

    def _embedding(self, head: Linear | None) -> Tensor | Table:
        if self._config.tied_embeddings and isinstance(head, TiledLinear | PlainLinear):
            return head
        dtype = self._dtype
        if dtype == torch.float32:  # ``take`` widens rows
            info = self._infos.get(EMBEDDING)
            dtype = torch.bfloat16 if info and _is_bf16(info) else dtype
        table = torch.empty(self._config.vocab_size, self._config.hidden_size, dtype=dtype, device=self._device)
        self._send(EMBEDDING, lambda tensor: _copy(table, tensor))
        return table

    def _linear(self, parts: Sequence[tuple[str, int, Change | None]], in_features: int) -> Linear:
        """Make a product from parts: name without suffix, out features, change of the rows before storing."""
        named = [(f"{name}.weight", f"{name}.bias", size, change) for name, size, change in parts]
        return self._merged(parts[0][0].rsplit(".", 1)[1], named, in_features)

    def _merged(self, role: str, parts: Sequence[tuple[str, str, int, Change | None]], in_features: int) -> Linear:
        names = {name for weight, bias, _size, _change in parts for name in (weight, bias) if name in self._infos}
        linear = self._new_linear(role, in_features, [size for _weight, _bias, size, _change in parts], names)
        for index, (weight, bias, size, change) in enumerate(parts):
            self._send(weight, _part_sink(linear.fill, index, (size, in_features), change))
            self._send(bias, _part_sink(linear.fill_bias, index, (size,), change))
        self._unfinished.append((names, linear))
        return linear

    def _new_linear(self, role: str, in_features: int, parts: Sequence[int], names: set[str]) -> Linear:
        if self._device.type != "cpu" or self._dtype != torch.float32:
            return PlainLinear(in_features, parts, dtype=self._dtype, device=self._device)
        exact = all(_is_half(self._infos[name]) for name in names)
        kind = HalfLinear if exact and half_works() else TiledLinear
        return kind(role, in_features, parts, self._workspace)

    def _vector(self, name: str, size: int, change: Change | None = None) -> Tensor:
        vector = torch.empty(size, dtype=self._dtype, device=self._device)
        self._send(name, lambda tensor: _copy(vector, change(tensor) if change else tensor))
        return vector

    def _send(self, name: str, sink: Sink) -> None:
        self._sinks.setdefault(name, []).append(sink)

    def _as_pairs(self, tensor: Tensor) -> Tensor:
        """Reorder rows (head, half, pair) to (head, pair, half), so that rotary pairs are adjacent."""
        half = self._config.head_dim // 2
        return tensor.view(-1, 2, half, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def load_slices(
    slices: Sequence[Slice],
    source: WeightSource,
    progress: Callable[[LoadProgress], None],
    *,
    dtype: torch.dtype,
    device: torch.device,
    workspace: Workspace,
) -> list[SliceWeights]:
    """Read every slice's tensors. Raises ModelInvalid, ArchitectureUnsupported, and torch's memory errors."""
    todo = [(part, info) for part in slices for info in source.tensors(part)]
    total_bytes = sum(info.num_bytes for _part, info in todo)
    done, done_bytes = 0, 0
    loaded: list[SliceWeights] = []
    for part in slices:
        infos = source.tensors(part)
        builder = SliceBuilder(source.config, part, infos, dtype=dtype, device=device, workspace=workspace)
        for info in infos:
            builder.take(info.name, host_tensor(source.read(info.name)))
            done, done_bytes = done + 1, done_bytes + info.num_bytes
            progress(
                LoadProgress(tensors_done=done, tensors_total=len(todo), bytes_done=done_bytes, bytes_total=total_bytes)
            )
        loaded.append(builder.weights)
    return loaded


def host_tensor(raw: RawTensor) -> Tensor:
    """Return the tensor in its logical shape: bf16 if exact (half the bytes), else float32."""
    if _is_bf16(raw.info):
        bits = as_bf16_bits(raw)
        return torch.from_numpy(bits.view("<i2") if bits.flags.writeable else bits.view("<i2").copy()).view(
            torch.bfloat16
        )
    values = as_float32(raw)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _is_bf16(info: TensorInfo) -> bool:
    """Return whether bf16 holds the tensor's values exactly."""
    return info.rounded or info.scheme == "BF16"


def _is_half(info: TensorInfo) -> bool:
    """Return whether fp16 holds the values to the precision of a float32 product; see HalfLinear."""
    return _is_bf16(info) or info.scheme == "F16"


def _part_sink(fill: Callable[[int, Tensor], None], index: int, shape: tuple[int, ...], change: Change | None) -> Sink:
    def sink(tensor: Tensor) -> None:
        if tuple(tensor.shape) != shape:
            raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
        fill(index, change(tensor) if change else tensor)

    return sink


def _copy(target: Tensor, source: Tensor) -> None:
    if target.shape != source.shape:
        raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
    target.copy_(source)
