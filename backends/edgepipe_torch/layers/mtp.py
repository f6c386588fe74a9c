"""The layer that predicts one token more: multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2).

T packed rows, H hidden, R rows that continue behind the mixer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from edgepipe_torch.layers.layer import Layer
from edgepipe_torch.layers.linear import HeldWeight, Linear
from edgepipe_torch.layers.mixers import SliceStep


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayer:
    """A decoder layer with an input and a norm of its own.

    All published engines agree by now on what is normalised: the model's output behind its final norm enters, and where
    a guess follows a guess, the layer's output behind its last norm does.
    """

    layer: Layer
    token_norm: Tensor  # [H] of the next token's embedding
    output_norm: Tensor  # [H] of the model's output, or of this layer's where a guess follows a guess
    product: Linear  # multiplies both inputs together [2 H]
    last_norm: Tensor  # [H]

    @property
    def linears(self) -> Sequence[HeldWeight]:
        """The weights of all products."""
        return [self.product, *self.layer.linears]

    def run(self, embedded: Tensor, finals: Tensor, step: SliceStep, wanted: Tensor) -> Tensor:
        """Write the rows' keys and values, and return the output [R, H] of rows ``wanted`` [R], in a new tensor.

        embedded  [T, H] the embeddings of the tokens behind the rows'
        finals    [T, H] the model's output for the rows, behind its final norm, or a result of this method
        """
        count, hidden_size = embedded.shape
        both = step.workspace.get("mtp", count, 2 * hidden_size)
        both[:, :hidden_size].copy_(step.ops.norm(embedded, self.token_norm))
        both[:, hidden_size:].copy_(step.ops.norm(finals, self.output_norm))
        hidden = self.layer.run(self.product.rows(both).clone(), step, wanted)
        return step.ops.norm(hidden, self.last_norm).clone() if hidden.shape[0] else hidden
