"""A decoder built from layer specs: norms, rotary, grouped-query attention, recurrent mixers, feed-forward parts.

T packed rows, H hidden, Hq and Hkv heads, D head dim, R rows that need logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.layer_spec import LayerSpec, Recurrent
from edgepipe_torch.layers.attention import StepAttention
from edgepipe_torch.layers.experts import CountsExperts
from edgepipe_torch.layers.feed_forward import FeedForward
from edgepipe_torch.layers.head_shape import LayerHeads, layer_heads
from edgepipe_torch.layers.kv import KVPool
from edgepipe_torch.layers.latent import LatentWeights
from edgepipe_torch.layers.linear import HeldWeight, Linear, PackedWeight, Table, Workspace
from edgepipe_torch.layers.recurrent import Mixer
from edgepipe_torch.layers.rope import Rotations
from edgepipe_torch.layers.states import StatePool, StepStates
from edgepipe_torch.layers.step_ops import StepOps, TorchOps


@dataclass(slots=True, kw_only=True)
class Layer:
    """Weights of one layer. Rows of q and k are ordered as rotary pairs: (0, D/2), (1, D/2 + 1), ..."""

    spec: LayerSpec
    input_norm: Tensor | None  # [H], before the mixer
    mixer: Mixer | None  # of a recurrent layer
    output: Linear | None  # None: the layer has no mixer
    attended_norm: Tensor | None  # [H], of what the mixer adds
    inner_norm: Tensor | None  # [H], before the feed-forward part
    feed_forward: FeedForward | None
    added_norm: Tensor | None  # [H], of what the feed-forward part adds
    output_scale: Tensor | None  # [1]
    # Of attention:
    qkv: Linear | None = None  # of latent attention: its input products; of gated attention: gates, then q, k, v
    latent: LatentWeights | None = None
    query_norm: Tensor | None = None  # [D], in the order of the pairs; or [Hq D]
    key_norm: Tensor | None = None  # [D] or [Hkv D]
    value_norm: Tensor | None = None  # [D]
    value_order: Tensor | None = (
        None  # [D] int64: dimensions of the key projection's product that are a value, if it is
    )
    rotation: int | None = None  # index among the step's rotations
    temperature: int | None = None  # index among the step's rotations; the real part is a factor on queries
    sinks: Tensor | None = None  # [Hq] float32

    @property
    def linears(self) -> list[HeldWeight]:
        """The weights of all products, but the latent's."""
        own = [each for each in (self.qkv, self.mixer.input if self.mixer else None, self.output) if each is not None]
        return [*own, *(self.feed_forward.linears if self.feed_forward else ())]


@dataclass(slots=True, kw_only=True)
class SliceWeights:
    """Weights of one slice."""

    part: Slice
    layers: list[Layer]
    embedding: Tensor | Table | None  # [V, H], possibly narrower than the compute dtype; or the tied head
    final_norm: Tensor | None
    head: Linear | None
    mixtures: Sequence[tuple[CountsExperts, int]] = ()  # of the layers with experts, with their number

    @property
    def packed(self) -> list[PackedWeight]:
        """Weights that stay packed."""
        found: list[object] = [each for layer in self.layers for each in layer.linears]
        found += [layer.latent.query for layer in self.layers if layer.latent and layer.latent.query]
        return [each for each in (*found, self.head, self.embedding) if isinstance(each, PackedWeight)]

    @property
    def waits(self) -> bool:
        """Whether computing waits for the device, which no graph can."""
        return any(layer.feed_forward.waits for layer in self.layers if layer.feed_forward is not None)

    @property
    def mixers(self) -> list[Recurrent]:
        """The recurrent layers' mixers, in order."""
        return [layer.spec.recurrent for layer in self.layers if layer.spec.recurrent is not None]


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
    states: StepStates | None = None  # of a slice with recurrent layers


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
        self.attending = [index for index, layer in enumerate(layers) if layer.spec.attention is not None]
        attentions = [layer.spec.attention for layer in layers if layer.spec.attention is not None]
        self.heads = layer_heads(attentions, [layers[index].sinks for index in self.attending])
        heads = dict(zip(self.attending, self.heads, strict=True))
        self._heads = [heads.get(index) for index in range(len(layers))]

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

    def run(self, hidden: Tensor, step: StepTensors, pool: KVPool, states: StatePool | None = None) -> Tensor:
        """Apply the layers to hidden [T, H] in place and write the rows' keys and values, and states. Returns hidden.

        With the head, returns [R, H]: after the last layer's mixer only rows that need logits continue.
        """
        last = self._weights.layers[-1] if self.part.head else None
        recurrent = 0
        for heads, layer in zip(self._heads, self._weights.layers, strict=True):
            mixed: Tensor | None = None
            if layer.mixer is not None:
                assert states is not None
                mixed = self._mix(layer, layer.mixer, hidden, step, states.layer(recurrent))
                recurrent += 1
            elif heads is not None and layer.qkv is not None:
                mixed = self._attend(heads, layer, layer.qkv.rows(self._normed(layer, hidden)), step, pool)
            if layer is last and not step.every_row:
                hidden = hidden[step.logit_rows]
                mixed = None if mixed is None else mixed[step.logit_rows]
            if hidden.shape[0]:
                self._add(layer, mixed, hidden)
        return hidden

    def _normed(self, layer: Layer, hidden: Tensor) -> Tensor:
        return hidden if layer.input_norm is None else self._ops.norm(hidden, layer.input_norm)

    def _mix(self, layer: Layer, mixer: Mixer, hidden: Tensor, step: StepTensors, states: tuple[Tensor, ...]) -> Tensor:
        """Return what enters a recurrent layer's output product [T, W]."""
        rows = step.states
        assert rows is not None
        made = mixer.input.rows(self._normed(layer, hidden))
        if mixer.kernel is not None and not rows.long:
            return mixer.rows(made, states, rows)
        return self._ops.compute(lambda: mixer.rows(made, states, rows).to(hidden.dtype))

    def _add(self, layer: Layer, mixed: Tensor | None, hidden: Tensor) -> None:
        """Add to hidden [R, H] what a layer computes from its mixer's outputs [R, Hq D]."""
        scale = layer.spec.residual_scale
        if layer.spec.norms == "parallel":
            assert mixed is not None
            attended = mixed
            self._ops.compute(lambda: self._add_parallel(layer, attended, hidden))
            return
        if mixed is not None and layer.output is not None:
            if layer.attended_norm is None and scale == 1:
                layer.output.add_to(mixed, hidden)
            else:
                self._add_normed(layer.output.rows(mixed), layer.attended_norm, scale, hidden)
        if layer.feed_forward is not None:
            self._add_fed(layer, layer.feed_forward, hidden)
        if (factor := layer.output_scale) is not None:
            self._ops.compute(lambda: hidden.mul_(factor))

    def _add_fed(self, layer: Layer, part: FeedForward, hidden: Tensor) -> None:
        """Add to hidden [R, H] what a layer's feed-forward part computes."""
        scale = layer.spec.residual_scale
        normed = hidden if layer.inner_norm is None else self._ops.norm(hidden, layer.inner_norm)
        if layer.added_norm is None and scale == 1:
            self._feed(part, normed, hidden)
        else:
            self._add_normed(self._fed(part, normed), layer.added_norm, scale, hidden)

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
        assert layer.feed_forward is not None
        assert layer.output is not None
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
        """Attend with qkv [T, (Hq + 2 Hkv) D], or latent attention's products; returns the heads' outputs [T, Hq V].

        Gated attention: qkv has the gates [T, Hq D] first.
        """
        gates: Tensor | None = None
        if layer.spec.attention is not None and layer.spec.attention.gated:
            width = heads.num_heads * heads.head_dim
            gates, qkv = qkv[:, :width], qkv[:, width:]
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
        if gates is not None:
            factors = gates
            self._ops.compute(lambda: out.mul_(factors.sigmoid()))
        latent = layer.latent
        return out if latent is None else self._ops.compute(lambda: latent.outputs(out))

    def _parts(self, heads: LayerHeads, layer: Layer, qkv: Tensor, rotations: Tensor | None) -> Tensor:
        """Return queries, keys and, where they are apart, values [T, n, D] of the input products qkv."""
        latent, order = layer.latent, layer.value_order
        if latent is not None:
            assert rotations is not None
            return self._ops.compute(lambda: latent.parts(qkv, rotations, self._workspace))
        parts = qkv.unflatten(1, (-1, heads.head_dim))
        if order is None:
            return parts
        keys = parts[:, heads.num_heads :]  # whose product has the values, too
        return self._ops.compute(lambda: torch.cat([parts, keys.index_select(2, order)], 1))
