"""A decoder built from layer specs: the layers of a slice, and its ends.

T packed rows, H hidden, V vocabulary, R rows that need logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe_torch.layers.experts import CountsExperts
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv import KVPool
from edgepipe_torch.layers.layer import Layer
from edgepipe_torch.layers.linear import HoldsPacked, Linear, Table, Workspace
from edgepipe_torch.layers.mixers import RecurrentMixer, SliceStep, StepTensors
from edgepipe_torch.layers.mtp import MtpLayer
from edgepipe_torch.layers.recurrent import Mixer
from edgepipe_torch.layers.rope import Rotations
from edgepipe_torch.layers.states import StatePool
from edgepipe_torch.layers.step_ops import StepOps, TorchOps


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceWeights:
    """Weights of one slice."""

    part: Slice
    layers: Sequence[Layer]
    heads: Sequence[LayerHeads]  # heads of the layers with attention
    embedding: Tensor | Table | None  # [V, H], possibly narrower than the compute dtype; or the tied head
    final_norm: Tensor | None
    head: Linear | None
    # Products of the layers with experts, and their number of experts.
    mixtures: Sequence[tuple[CountsExperts, int]] = ()
    mtp: MtpLayer | None = None  # not one of ``layers``; ``heads`` has its heads, behind theirs

    @property
    def packed(self) -> list[HoldsPacked]:
        """Weights that stay packed."""
        found: list[object] = [each for layer in self.layers for each in layer.linears]
        found += self.mtp.linears if self.mtp is not None else []
        return [each for each in (*found, self.head, self.embedding) if isinstance(each, HoldsPacked)]

    @property
    def waits(self) -> bool:
        """Whether computing waits for the device, which no graph can."""
        return any(layer.feed_forward.waits for layer in self.layers if layer.feed_forward is not None)

    @property
    def mixers(self) -> list[Mixer]:
        """The recurrent layers' mixers, in order."""
        return [layer.mixer.cell for layer in self.layers if isinstance(layer.mixer, RecurrentMixer)]


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
        self.heads = weights.heads
        layers = [*weights.layers, *(() if weights.mtp is None else (weights.mtp.layer,))]
        self.classes: Sequence[int] = [0] * len(layers)  # memory class of each kind of layer
        self.attending = [index for index, layer in enumerate(layers) if layer.spec.attention is not None]

    def with_workspace(self, workspace: Workspace) -> Decoder:
        """Return a decoder of the same layers with buffers of its own."""
        found = Decoder(self.config, self._weights, workspace, self._ops)
        found.classes = self.classes
        return found

    @property
    def part(self) -> Slice:
        """The slice."""
        return self._weights.part

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
        run = self._slice_step(step, pool, states)
        wanted = step.logit_rows if self.part.head and not step.every_row else None
        *others, last = self._weights.layers or [None]
        for layer in others:
            hidden = layer.run(hidden, run) if layer is not None else hidden
        if last is not None:
            return last.run(hidden, run, wanted)
        return hidden if wanted is None else hidden[wanted]

    @property
    def has_experts(self) -> bool:
        """Whether a layer of the slice has experts."""
        return bool(self._weights.mixtures)

    @property
    def predicts_more(self) -> bool:
        """Whether the slice has a layer that predicts one token more."""
        return self._weights.mtp is not None

    def predict(self, ids: Tensor, finals: Tensor, step: StepTensors, pool: KVPool) -> Tensor:
        """Run the layer that predicts one token more; write its keys and values.

        ids     [T] int64, the tokens behind the step's
        finals  [T, H], see ``MtpLayer.run``

        Returns [R, H], as ``finals`` of the rows that need logits.
        """
        assert self._weights.mtp is not None
        embedded = self._workspace.get("embedded", len(ids), self.config.hidden_size)
        self.embed(ids, embedded)
        return self._weights.mtp.run(embedded, finals, self._slice_step(step, pool, None), step.logit_rows)

    def _slice_step(self, step: StepTensors, pool: KVPool, states: StatePool | None) -> SliceStep:
        return SliceStep(step, pool, states, self.classes, self._ops, self._workspace)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [R, V] float32, in a new tensor, from hidden [R, H] of ``run``."""
        return self.logits_of(self.finals(hidden))

    def logits_of(self, finals: Tensor) -> Tensor:
        """Compute logits [R, V] float32, in a new tensor, from ``finals`` [R, H]."""
        if finals.shape[0] == 0:
            return torch.empty(0, self.config.vocab_size, device=finals.device)
        return self.shaped(self.head_product(finals).to(torch.float32, copy=True).contiguous())

    def shaped(self, logits: Tensor) -> Tensor:
        """Scale and cap the head's product [R, V] float32 in place, as the model does."""
        if self.config.logit_scale != 1:
            logits.mul_(self.config.logit_scale)
        if cap := self.config.logit_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def finals(self, hidden: Tensor) -> Tensor:
        """Return hidden [R, H] of ``run`` behind the final norm, valid until the next norm."""
        assert self._weights.final_norm is not None
        return self._ops.norm(hidden, self._weights.final_norm) if hidden.shape[0] else hidden

    def head_product(self, finals: Tensor) -> Tensor:
        """Compute logits [R, V] in the compute dtype, valid until the next product, from ``finals`` [R, H]."""
        assert self._weights.head is not None
        return self._weights.head.rows(finals)
