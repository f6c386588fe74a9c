"""Mixers of a layer: what mixes the tokens of a step, up to the layer's output product.

T packed rows, H hidden, Hq and Hkv heads, D head dim, W features of the output product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from edgepipe_torch.layers.attention import StepAttention
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv import KVPool
from edgepipe_torch.layers.linear import HeldWeight, Linear, Workspace
from edgepipe_torch.layers.packed_attention import SpanAttention, StepRests
from edgepipe_torch.layers.recurrent import Mixer
from edgepipe_torch.layers.states import StatePool, StepStates
from edgepipe_torch.layers.step_ops import NO_NORMS, HeadNorms, StepOps


class ClassTensors(NamedTuple):
    """Where a step's keys and values are, in the layers of one memory class."""

    slots: Tensor  # [T] int64
    attention: StepAttention
    rests: StepRests | None = None  # only for KV whose newest tokens have more bits


@dataclass(slots=True, kw_only=True)
class StepTensors:
    """Device tensors of a step."""

    classes: Sequence[ClassTensors]  # one per memory class
    rotations: Sequence[Tensor]  # [T, 1, D / 2] complex64, for each kind of rotary embedding
    logit_rows: Tensor  # [R] int64
    every_row: bool = False  # each row needs logits, in order
    states: StepStates | None = None  # states of a slice with recurrent layers


@dataclass(frozen=True, slots=True)
class SliceStep:
    """A step in the layers of a slice."""

    tensors: StepTensors
    pool: KVPool
    states: StatePool | None
    classes: Sequence[int]  # memory class of each kind of layer
    ops: StepOps
    workspace: Workspace

    def attend(
        self,
        heads: LayerHeads,
        parts: Tensor,
        rotations: Tensor | None,
        temperature: int | None,
        norms: HeadNorms = NO_NORMS,
    ) -> Tensor:
        """Write keys and values, and attend. Return the heads' outputs [T, Hq V], valid until the next layer's.

        parts        [T, n, D]: queries, keys and, where they are apart, values
        rotations    [T, 1, pairs] complex64 of queries and keys; None: nothing rotates, or it is done
        temperature  index among the step's rotations, whose real part is a factor on queries
        norms        of heads, before they rotate
        """
        queries = parts[:, : heads.num_heads]
        slots, attention, rests = self.tensors.classes[self.classes[heads.kind]]
        if isinstance(attention, SpanAttention):
            attention.open(heads)
        self.ops.place(parts, rotations, slots, self.pool, heads, norms, rests)
        if temperature is not None:
            factors = self.tensors.rotations[temperature].real
            self.ops.compute(lambda: queries.mul_(factors))
        out = self.workspace.get("attended", parts.shape[0], heads.num_heads * heads.out_dim)
        attention.run(heads, queries, out.view(parts.shape[0], heads.num_heads, -1))
        return out


class LayerMixer(Protocol):
    """Attention, or a recurrent mixer."""

    output: Linear  # product that takes the result of ``rows``

    @property
    def products(self) -> tuple[Linear, Linear]:
        """The products that every row passes: of the layer's input, and of its output."""
        ...

    @property
    def linears(self) -> Sequence[HeldWeight]:
        """The weights of all products."""
        ...

    def rows(self, x: Tensor, step: SliceStep) -> Tensor:
        """Mix x [T, H], and write the rows' keys and values, or states. Returns [T, W]."""
        ...


@dataclass(slots=True, kw_only=True)
class SelfAttention:
    """Grouped-query attention. Rows of q and k are ordered as rotary pairs: (0, D/2), (1, D/2 + 1), ..."""

    heads: LayerHeads
    gated: bool
    qkv: Linear  # gated attention computes gates, then q, k, v
    output: Linear
    query_norm: Tensor | None  # [D], in the order of the pairs; or [Hq D]
    key_norm: Tensor | None  # [D] or [Hkv D]
    value_norm: Tensor | None  # [D]
    value_order: Tensor | None  # [D] int64: dimensions of the key projection's product that are a value, if it is
    rotation: int | None  # index among the step's rotations
    temperature: int | None  # see ``SliceStep.attend``

    @property
    def products(self) -> tuple[Linear, Linear]:
        return self.qkv, self.output

    linears = products

    def rows(self, x: Tensor, step: SliceStep) -> Tensor:
        heads, ops, qkv = self.heads, step.ops, self.qkv.rows(x)
        gates: Tensor | None = None
        if self.gated:
            width = heads.num_heads * heads.head_dim
            gates, qkv = qkv[:, :width], qkv[:, width:]
        parts = qkv.unflatten(1, (-1, heads.head_dim))
        if (order := self.value_order) is not None:
            queries_keys, keys = parts, parts[:, heads.num_heads :]  # the keys' product has the values, too
            parts = ops.compute(lambda: torch.cat([queries_keys, keys.index_select(2, order)], 1))
        rotations = None if self.rotation is None else step.tensors.rotations[self.rotation]
        norms = HeadNorms(self.query_norm, self.key_norm, self.value_norm)
        out = step.attend(heads, parts, rotations, self.temperature, norms)
        if (factors := gates) is not None:
            ops.compute(lambda: out.mul_(factors.sigmoid()))
        return out


@dataclass(slots=True, kw_only=True)
class RecurrentMixer:
    """A recurrent layer's mixer."""

    cell: Mixer
    output: Linear
    place: int  # index among the slice's recurrent layers

    @property
    def products(self) -> tuple[Linear, Linear]:
        return self.cell.input, self.output

    linears = products

    def rows(self, x: Tensor, step: SliceStep) -> Tensor:
        rows, cell = step.tensors.states, self.cell
        assert rows is not None
        assert step.states is not None
        made, states = cell.input.rows(x), step.states.layer(self.place)
        if cell.kernel is not None and not rows.long:
            return cell.rows(made, states, rows)
        return step.ops.compute(lambda: cell.rows(made, states, rows).to(x.dtype))
