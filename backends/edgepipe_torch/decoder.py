"""A decoder built from layer specs: norms, rotary, grouped-query attention, gated feed-forward parts, experts.

T packed rows, H hidden, Hq and Hkv heads, D head dim, R rows that need logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.layer_spec import LayerSpec
from edgepipe_torch.attention import StepAttention
from edgepipe_torch.feed_forward import ExpertProducts, FeedForward
from edgepipe_torch.head_shape import LayerHeads, layer_heads
from edgepipe_torch.kv import KVPool
from edgepipe_torch.latent import LatentWeights
from edgepipe_torch.linear import Linear, PackedWeight, Table, Workspace
from edgepipe_torch.rope import Rotations
from edgepipe_torch.step_ops import StepOps, TorchOps


@dataclass(slots=True, kw_only=True)
class Layer:
    """Weights of one layer. Rows of q and k are ordered as rotary pairs: (0, D/2), (1, D/2 + 1), ..."""

    spec: LayerSpec
    input_norm: Tensor | None  # [H], before attention
    qkv: Linear  # of latent attention: its input products
    latent: LatentWeights | None
    query_norm: Tensor | None  # [D], in the order of the pairs; or [Hq D]
    key_norm: Tensor | None  # [D] or [Hkv D]
    value_norm: Tensor | None  # [D]
    value_order: Tensor | None  # [D] int64: dimensions of the key projection's product that are a value, if it is
    output: Linear
    attended_norm: Tensor | None  # [H], of what attention adds
    inner_norm: Tensor | None  # [H], before the feed-forward part
    feed_forward: FeedForward
    added_norm: Tensor | None  # [H], of what the feed-forward part adds
    rotation: int | None  # index among the step's rotations
    temperature: int | None  # index among the step's rotations; the real part is a factor on queries
    sinks: Tensor | None  # [Hq] float32
    output_scale: Tensor | None  # [1]


@dataclass(slots=True, kw_only=True)
class SliceWeights:
    """Weights of one slice."""

    part: Slice
    layers: list[Layer]
    embedding: Tensor | Table | None  # [V, H], possibly narrower than the compute dtype; or the tied head
    final_norm: Tensor | None
    head: Linear | None
    mixtures: Sequence[tuple[ExpertProducts, int]] = ()  # of the layers with experts, with their number

    @property
    def packed(self) -> list[PackedWeight]:
        """Weights that stay packed."""
        found = [each for layer in self.layers for each in (layer.qkv, layer.output, *layer.feed_forward.linears)]
        found += [layer.latent.query for layer in self.layers if layer.latent and layer.latent.query]
        return [each for each in (*found, self.head, self.embedding) if isinstance(each, PackedWeight)]

    @property
    def waits(self) -> bool:
        """Whether computing waits for the device, which no graph can."""
        return any(layer.feed_forward.waits for layer in self.layers)


class ClassTensors(NamedTuple):
    """Where a step's keys and values are, in the layers of one memory class."""

    slots: Tensor  # [T] int64
    attention: StepAttention


@dataclass(slots=True, kw_only=True)
class StepTensors:
    """Device tensors of a step."""

    classes: Sequence[ClassTensors]  # by memory class
    rotations: Sequence[Tensor]  # [T, 1, D / 2] complex64, for each kind of rotary embedding
    logit_rows: Tensor  # [R] int64
    every_row: bool = False  # each row needs logits, in order


class Decoder:
    """Runs the layers of a slice."""

    def __init__(
        self, config: ModelConfig, weights: SliceWeights, workspace: Workspace, ops: StepOps | None = None
    ) -> None:
        """``ops``: the small operations, by default torch's."""
        self.config = config
        self._weights = weights
        self._workspace = workspace
        self._ops = ops or TorchOps(config)
        layers = weights.layers
        self.classes: Sequence[int] = [0] * len(layers)  # memory class of each kind of layer
        self.heads = layer_heads([layer.spec.attention for layer in layers], [layer.sinks for layer in layers])

    @property
    def part(self) -> Slice:
        """The slice."""
        return self._weights.part

    @property
    def layers(self) -> list[Layer]:
        """The slice's layers."""
        return self._weights.layers

    @property
    def rotated_pairs(self) -> Sequence[int]:
        """Rotary pairs of each kind of rotary embedding among the model's layers."""
        return Rotations(self.config).pairs

    def embed(self, ids: Tensor, hidden: Tensor) -> None:
        """Embed ids [T] int64 into hidden [T, H], which is overwritten."""
        table = self._weights.embedding
        assert table is not None
        hidden.copy_(table.index_select(0, ids) if isinstance(table, Tensor) else table.take(ids))
        if self.config.embedding_scale != 1:
            hidden.mul_(self.config.embedding_scale)

    def run(self, hidden: Tensor, step: StepTensors, pool: KVPool) -> Tensor:
        """Apply the layers to hidden [T, H] in place and write the rows' keys and values. Returns hidden.

        With the head, returns [R, H]: after the last layer's attention only rows that need logits continue.
        """
        last = self._weights.layers[-1] if self.part.head else None
        for heads, layer in zip(self.heads, self._weights.layers, strict=True):
            normed = hidden if layer.input_norm is None else self._ops.norm(hidden, layer.input_norm)
            attended = self._attend(heads, layer, layer.qkv.rows(normed), step, pool)
            if layer is last and not step.every_row:
                hidden, attended = hidden[step.logit_rows], attended[step.logit_rows]
            if hidden.shape[0]:
                self._add(layer, attended, hidden)
        return hidden

    def _add(self, layer: Layer, attended: Tensor, hidden: Tensor) -> None:
        """Add to hidden [R, H] what a layer computes from its heads' outputs [R, Hq D]."""
        scale = layer.spec.residual_scale
        if layer.spec.norms == "parallel":
            self._ops.compute(lambda: self._add_parallel(layer, attended, hidden))
            return
        if layer.attended_norm is None and scale == 1:
            layer.output.add_to(attended, hidden)
        else:
            self._add_normed(layer.output.rows(attended), layer.attended_norm, scale, hidden)
        normed = hidden if layer.inner_norm is None else self._ops.norm(hidden, layer.inner_norm)
        if layer.added_norm is None and scale == 1:
            self._feed(layer.feed_forward, normed, hidden)
        else:
            added = self._fed(layer.feed_forward, normed)
            self._add_normed(added, layer.added_norm, scale, hidden)
        if (factor := layer.output_scale) is not None:
            self._ops.compute(lambda: hidden.mul_(factor))

    def _feed(self, part: FeedForward, x: Tensor, total: Tensor) -> None:
        """Add a feed-forward part's result for x [R, H] to total [R, H]."""

        def feed() -> Tensor:
            part.add_to(x, total)
            return total

        if part.products:
            feed()
        else:
            self._ops.compute(feed)

    def _fed(self, part: FeedForward, x: Tensor) -> Tensor:
        """Return a feed-forward part's result [R, H] for x [R, H]."""
        return part.rows(x) if part.products else self._ops.compute(lambda: part.rows(x))

    def _add_parallel(self, layer: Layer, attended: Tensor, hidden: Tensor) -> Tensor:
        """Add both parts of a layer, of which each reads the same norm of hidden [R, H]; returns hidden."""
        assert layer.input_norm is not None
        added = layer.feed_forward.rows(self._ops.norm(hidden, layer.input_norm)).clone()
        return hidden.add_(added.add_(layer.output.rows(attended)), alpha=layer.spec.residual_scale)

    def _add_normed(self, added: Tensor, norm: Tensor | None, scale: float, hidden: Tensor) -> None:
        normed = added if norm is None else self._ops.norm(added, norm)
        self._ops.compute(lambda: hidden.add_(normed, alpha=scale))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [R, V] float32, in a new tensor, from hidden [R, H] of ``run``."""
        if hidden.shape[0] == 0:
            return torch.empty(0, self.config.vocab_size, device=hidden.device)
        return self.shaped(self.head_product(hidden).to(torch.float32, copy=True).contiguous())

    def shaped(self, logits: Tensor) -> Tensor:
        """Scale and cap the head's product [R, V] float32 in place, as the model does."""
        if self.config.logit_scale != 1:
            logits.mul_(self.config.logit_scale)
        if cap := self.config.logit_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def head_product(self, hidden: Tensor) -> Tensor:
        """Compute logits [R, V] in the compute dtype, valid until the next product, from hidden [R, H] of ``run``."""
        assert self._weights.head is not None
        assert self._weights.final_norm is not None
        return self._weights.head.rows(self._ops.norm(hidden, self._weights.final_norm))

    def _attend(self, heads: LayerHeads, layer: Layer, qkv: Tensor, step: StepTensors, pool: KVPool) -> Tensor:
        """Attend with qkv [T, (Hq + 2 Hkv) D], or latent attention's products; returns the heads' outputs [T, Hq V]."""
        rotations = None if layer.rotation is None else step.rotations[layer.rotation]
        parts = self._parts(heads, layer, qkv, rotations)
        if layer.latent is not None:
            rotations = None  # which are in the parts
        queries = parts[:, : heads.num_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            self._ops.norm_heads(queries, layer.query_norm)
            self._ops.norm_heads(parts[:, heads.num_heads : heads.num_heads + heads.num_kv_heads], layer.key_norm)
        if layer.value_norm is not None:
            self._ops.norm_heads(parts[:, heads.num_heads + heads.num_kv_heads :], layer.value_norm)
        slots, attention = step.classes[self.classes[heads.kind]]
        self._ops.place(parts, rotations, slots, pool, heads)
        if layer.temperature is not None:
            factors = step.rotations[layer.temperature].real
            self._ops.compute(lambda: queries.mul_(factors))
        out = self._workspace.get("attended", qkv.shape[0], heads.num_heads * heads.out_dim)
        attention.run(heads, queries, out.view(qkv.shape[0], heads.num_heads, -1))
        latent = layer.latent
        return out if latent is None else self._ops.compute(lambda: latent.outputs(out))

    def _parts(self, heads: LayerHeads, layer: Layer, qkv: Tensor, rotations: Tensor | None) -> Tensor:
        """Return queries, keys and, where they are apart, values [T, n, D] of the input products qkv."""
        latent, order = layer.latent, layer.value_order
        if latent is not None:
            assert rotations is not None
            return self._ops.compute(lambda: latent.parts(qkv, rotations))
        parts = qkv.view(qkv.shape[0], -1, heads.head_dim)
        if order is None:
            return parts
        keys = parts[:, heads.num_heads :]  # whose product has the values, too
        return self._ops.compute(lambda: torch.cat([parts, keys.index_select(2, order)], 1))
