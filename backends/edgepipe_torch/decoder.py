"""Decoder of the Llama family: RMSNorm, rotary, grouped-query attention, SwiGLU; biases, q/k norms and windows.

T packed rows, H hidden, Hq and Hkv heads, D head dim, R rows that need logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgepipe.model.facts import ModelConfig, Slice
from edgepipe_torch.attention import StepAttention
from edgepipe_torch.kv import KVPool
from edgepipe_torch.linear import Linear, Table, Workspace
from edgepipe_torch.step_ops import StepOps, TorchOps


@dataclass(slots=True, kw_only=True)
class Layer:
    """Weights of one layer. Rows of q and k are ordered as rotary pairs: (0, D/2), (1, D/2 + 1), ..."""

    input_norm: Tensor  # [H]
    qkv: Linear
    query_norm: Tensor | None  # [D], in the order of the pairs
    key_norm: Tensor | None  # [D]
    output: Linear
    post_norm: Tensor  # [H]
    gate_up: Linear
    down: Linear
    window: int | None  # tokens that a query sees, including itself


@dataclass(slots=True, kw_only=True)
class SliceWeights:
    """Weights of one slice."""

    part: Slice
    layers: list[Layer]
    embedding: Tensor | Table | None  # [V, H], possibly narrower than the compute dtype; or the tied head
    final_norm: Tensor | None
    head: Linear | None


@dataclass(slots=True, kw_only=True)
class StepTensors:
    """Device tensors of a step."""

    slots: Tensor  # [T] int64
    rotations: Tensor  # [T, 1, D / 2] complex64
    attention: StepAttention
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

    @property
    def part(self) -> Slice:
        """The slice."""
        return self._weights.part

    @property
    def layers(self) -> list[Layer]:
        """The slice's layers."""
        return self._weights.layers

    def embed(self, ids: Tensor, hidden: Tensor) -> None:
        """Embed ids [T] int64 into hidden [T, H], which is overwritten."""
        table = self._weights.embedding
        assert table is not None
        hidden.copy_(table.index_select(0, ids) if isinstance(table, Tensor) else table.take(ids))

    def run(self, hidden: Tensor, step: StepTensors, pool: KVPool) -> Tensor:
        """Apply the layers to hidden [T, H] in place and write the rows' keys and values. Returns hidden.

        With the head, returns [R, H]: after the last layer's attention only rows that need logits continue.
        """
        last = self._weights.layers[-1] if self.part.head else None
        for index, layer in enumerate(self._weights.layers):
            normed = self._ops.norm(hidden, layer.input_norm)
            attended = self._attend(index, layer, layer.qkv.rows(normed), step, pool)
            if layer is last and not step.every_row:
                hidden, attended = hidden[step.logit_rows], attended[step.logit_rows]
            if hidden.shape[0]:
                layer.output.add_to(attended, hidden)
                normed = self._ops.norm(hidden, layer.post_norm)
                layer.down.add_to(layer.gate_up.swiglu(normed), hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [R, V] float32, in a new tensor, from hidden [R, H] of ``run``."""
        if hidden.shape[0] == 0:
            return torch.empty(0, self.config.vocab_size, device=hidden.device)
        return self.head_product(hidden).to(torch.float32, copy=True).contiguous()

    def head_product(self, hidden: Tensor) -> Tensor:
        """Compute logits [R, V] in the compute dtype, valid until the next product, from hidden [R, H] of ``run``."""
        assert self._weights.head is not None
        assert self._weights.final_norm is not None
        return self._weights.head.rows(self._ops.norm(hidden, self._weights.final_norm))

    def _attend(self, index: int, layer: Layer, qkv: Tensor, step: StepTensors, pool: KVPool) -> Tensor:
        """Attend with qkv [T, (Hq + 2 Hkv) D]; returns the heads' outputs [T, Hq D]."""
        config = self.config
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            self._ops.norm_heads(heads[:, : config.num_heads], layer.query_norm)
            self._ops.norm_heads(heads[:, config.num_heads : config.num_heads + config.num_kv_heads], layer.key_norm)
        self._ops.place(heads, step.rotations, step.slots, pool, index)
        queries = heads[:, : config.num_heads]
        out = self._workspace.get("attended", qkv.shape[0], config.num_heads * config.head_dim)
        step.attention.run(index, layer.window, queries, out.view(queries.shape))
        return out
