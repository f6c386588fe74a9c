"""A decoder layer: norms, a mixer, a feed-forward part.

T packed rows, H hidden, R rows that continue behind the mixer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from edgepipe.spec.layer_spec import LayerSpec
from edgepipe_torch.layers.feed_forward import FeedForward
from edgepipe_torch.layers.linear import HeldWeight
from edgepipe_torch.layers.mixers import LayerMixer, SliceStep
from edgepipe_torch.layers.step_ops import StepOps


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer."""

    spec: LayerSpec
    input_norm: Tensor | None  # [H], before the mixer
    mixer: LayerMixer | None
    attended_norm: Tensor | None  # [H], of what the mixer adds
    inner_norm: Tensor | None  # [H], before the feed-forward part
    feed_forward: FeedForward | None
    added_norm: Tensor | None  # [H], of what the feed-forward part adds
    output_scale: Tensor | None  # [1]

    @property
    def linears(self) -> Sequence[HeldWeight]:
        """The weights of all products."""
        return [each for part in (self.mixer, self.feed_forward) if part is not None for each in part.linears]

    def run(self, hidden: Tensor, step: SliceStep, wanted: Tensor | None = None) -> Tensor:
        """Add to hidden [T, H] in place what the layer computes; returns it, or of its rows those ``wanted`` [R]."""
        mixed: Tensor | None = None
        if self.mixer is not None:
            mixed = self.mixer.rows(self._normed(hidden, self.input_norm, step.ops), step)
        if wanted is not None:
            hidden = hidden[wanted]
            mixed = None if mixed is None else mixed[wanted]
        if hidden.shape[0]:
            self._add(mixed, hidden, step.ops)
        return hidden

    def _add(self, mixed: Tensor | None, hidden: Tensor, ops: StepOps) -> None:
        """Add to hidden [R, H] what follows the mixer's rows [R, W]."""
        if self.spec.norms == "parallel":
            assert mixed is not None
            attended = mixed
            ops.compute(lambda: self._add_parallel(attended, hidden, ops))
            return
        plain = self.spec.residual_scale == 1
        if mixed is not None and self.mixer is not None:
            if plain and self.attended_norm is None:
                self.mixer.output.add_to(mixed, hidden)
            else:
                self._add_normed(self.mixer.output.rows(mixed), self.attended_norm, hidden, ops)
        if (part := self.feed_forward) is not None:
            normed = self._normed(hidden, self.inner_norm, ops)
            if plain and self.added_norm is None:
                _feed(part, normed, hidden, ops)
            else:
                added = part.rows(normed) if part.products else ops.compute(lambda: part.rows(normed))
                self._add_normed(added, self.added_norm, hidden, ops)
        if (factor := self.output_scale) is not None:
            ops.compute(lambda: hidden.mul_(factor))

    def _add_parallel(self, attended: Tensor, hidden: Tensor, ops: StepOps) -> Tensor:
        """Add both parts, of which each reads the same norm of hidden [R, H]; returns hidden."""
        assert self.feed_forward is not None
        assert self.mixer is not None
        added = self.feed_forward.rows(self._normed(hidden, self.input_norm, ops)).clone()
        return hidden.add_(added.add_(self.mixer.output.rows(attended)), alpha=self.spec.residual_scale)

    def _add_normed(self, added: Tensor, norm: Tensor | None, hidden: Tensor, ops: StepOps) -> None:
        normed, scale = self._normed(added, norm, ops), self.spec.residual_scale
        ops.compute(lambda: hidden.add_(normed, alpha=scale))

    @staticmethod
    def _normed(x: Tensor, norm: Tensor | None, ops: StepOps) -> Tensor:
        return x if norm is None else ops.norm(x, norm)


def _feed(part: FeedForward, x: Tensor, total: Tensor, ops: StepOps) -> None:
    """Add a feed-forward part's result for x [R, H] to total [R, H]."""

    def feed() -> Tensor:
        part.add_to(x, total)
        return total

    if part.products:
        part.add_to(x, total)
    else:
        ops.compute(feed)
