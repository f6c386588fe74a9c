"""Weights from a source into a slice, one tensor at a time: each raw tensor is dropped before the next is read.

Merged and tiled storage is allocated first and filled in place, so nothing is ever held twice.
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
from edgepipe.model.tensors import RawTensor, WeightSource
from edgepipe_torch.decoder import Layer, SliceWeights
from edgepipe_torch.linear import Linear, PlainLinear, TiledLinear, Workspace

Sink = Callable[[Tensor], None]


class SliceBuilder:
    """Empty storage for a slice, and where each named tensor goes in it."""

    def __init__(
        self, config: ModelConfig, part: Slice, *, dtype: torch.dtype, device: torch.device, workspace: Workspace
    ) -> None:
        if config.head_dim % 2:
            raise ArchitectureUnsupported("an odd head dimension cannot be rotated", fact=f"it is {config.head_dim}")
        self._config = config
        self._dtype = dtype
        self._device = device
        self._workspace = workspace
        self._sinks: dict[str, Sink] = {}
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
        """Copy a host tensor to where it belongs. Raises ModelInvalid for a name or shape that has no place here."""
        if name not in self._sinks:
            raise ModelInvalid(f"tensor '{name}' has no place in the slice")
        try:
            self._sinks[name](tensor)
        except RuntimeError as exc:
            raise ModelInvalid(
                f"tensor '{name}' does not fit the config", fact=f"its shape is {list(tensor.shape)}"
            ) from exc

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
        linear = self._new_linear("head", self._config.hidden_size, [self._config.vocab_size])
        name = EMBEDDING if self._config.tied_embeddings else HEAD
        self._sinks[name] = lambda tensor: linear.fill(0, tensor)
        return linear

    def _embedding(self, head: Linear | None) -> Tensor | Linear:
        if head is not None and self._config.tied_embeddings:
            return head
        table = torch.empty(self._config.vocab_size, self._config.hidden_size, dtype=self._dtype, device=self._device)
        self._sinks[EMBEDDING] = lambda tensor: _copy(table, tensor)
        return table

    def _linear(self, parts: Sequence[tuple[str, int, Callable[[Tensor], Tensor] | None]], in_features: int) -> Linear:
        """A linear merged of parts (name, out features, what to do with the rows first)."""
        role = parts[0][0].rsplit(".", 1)[1]
        linear = self._new_linear(role, in_features, [size for _name, size, _change in parts])
        for index, (name, size, change) in enumerate(parts):
            self._sinks[f"{name}.weight"] = _part_sink(linear.fill, index, (size, in_features), change)
            self._sinks[f"{name}.bias"] = _part_sink(linear.fill_bias, index, (size,), change)
        return linear

    def _new_linear(self, role: str, in_features: int, parts: Sequence[int]) -> Linear:
        if self._device.type == "cpu" and self._dtype == torch.float32:
            return TiledLinear(role, in_features, parts, self._workspace)
        return PlainLinear(in_features, parts, dtype=self._dtype, device=self._device)

    def _vector(self, name: str, size: int, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        vector = torch.empty(size, dtype=self._dtype, device=self._device)
        self._sinks[name] = lambda tensor: _copy(vector, change(tensor) if change else tensor)
        return vector

    def _as_pairs(self, tensor: Tensor) -> Tensor:
        """Rows (head, half, pair) to (head, pair, half): what is rotated together stands together."""
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
    """Read every slice's tensors. Raises ModelInvalid, ArchitectureUnsupported; torch's errors where memory ends."""
    todo = [(part, info) for part in slices for info in source.tensors(part)]
    total_bytes = sum(info.num_bytes for _part, info in todo)
    done, done_bytes = 0, 0
    loaded: list[SliceWeights] = []
    for part in slices:
        builder = SliceBuilder(source.config, part, dtype=dtype, device=device, workspace=workspace)
        for info in source.tensors(part):
            builder.take(info.name, host_tensor(source.read(info.name)))
            done, done_bytes = done + 1, done_bytes + info.num_bytes
            progress(
                LoadProgress(tensors_done=done, tensors_total=len(todo), bytes_done=done_bytes, bytes_total=total_bytes)
            )
        loaded.append(builder.weights)
    return loaded


def host_tensor(raw: RawTensor) -> Tensor:
    """The tensor in its logical shape: bf16 where that is exact (half the bytes in passing), else float32."""
    if raw.info.rounded or raw.info.scheme == "BF16":
        bits = as_bf16_bits(raw)
        return torch.from_numpy(bits.view("<i2") if bits.flags.writeable else bits.view("<i2").copy()).view(
            torch.bfloat16
        )
    values = as_float32(raw)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _part_sink(
    fill: Callable[[int, Tensor], None], index: int, shape: tuple[int, ...], change: Callable[[Tensor], Tensor] | None
) -> Sink:
    def sink(tensor: Tensor) -> None:
        if tuple(tensor.shape) != shape:
            raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
        fill(index, change(tensor) if change else tensor)

    return sink


def _copy(target: Tensor, source: Tensor) -> None:
    if target.shape != source.shape:
        raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
    target.copy_(source)
