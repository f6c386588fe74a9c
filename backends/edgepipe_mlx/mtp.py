"""The layer that predicts one token more: multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2).

T packed rows, H hidden, R rows that continue behind the mixer.
"""

from __future__ import annotations

import mlx.core as mx

from edgepipe.spec.layout import MTP_INPUT, MTP_NORMS, MTP_OUTPUT_NORM
from edgepipe_mlx.attention import LayerStep
from edgepipe_mlx.layer_weights import LayerWeights
from edgepipe_mlx.layers import DecoderLayer

_SUFFIX = ".weight"


class MtpLayer:
    """A decoder layer with an input and a norm of its own. Enters and leaves normalised, as on torch."""

    def __init__(self, layer: DecoderLayer, weights: LayerWeights) -> None:
        self._layer = layer
        self._token_norm, self._output_norm, self._last_norm = (
            weights.norm(name.removesuffix(_SUFFIX)) for name in (*MTP_NORMS, MTP_OUTPUT_NORM)
        )
        self._product = weights.linear(MTP_INPUT.removesuffix(_SUFFIX))

    def run(self, embedded: mx.array, finals: mx.array, step: LayerStep, wanted: mx.array | None) -> mx.array:
        """Write the rows' keys and values, and return the output [R, H] of rows ``wanted`` [R]; None: of all.

        embedded  [T, H] the embeddings of the tokens behind the rows'
        finals    [T, H] the model's output for the rows, behind its final norm, or a result of this method
        """
        both = mx.concatenate([self._token_norm.rows(embedded), self._output_norm.rows(finals)], axis=-1)
        return self._last_norm.rows(self._layer.run(self._product.multiply(both), step, wanted))
