"""What enters and leaves a slice, in the types of the link, and the logits of its head.

T packed tokens, H hidden, R rows that need logits, S scored rows, V vocabulary.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from edgepipe.backend.types import Activations, ActivationType, ScoreRows, TokenIds
from edgepipe.errors import ShardMismatch
from edgepipe.spec.facts import ModelConfig
from edgepipe_mlx.loading import LoadedSlice

SCORED_AT_ONCE = 64  # rows of prompt log-probabilities: 40 MB of logits with a vocabulary of 152,000


class SliceEnds:
    """Both ends of one slice."""

    def __init__(
        self, config: ModelConfig, part: LoadedSlice, *, dtype: mx.Dtype, activation_type: ActivationType
    ) -> None:
        self._config = config
        self._part = part
        self._dtype = dtype
        self._activation_type = activation_type

    def hidden(self, num_tokens: int, inputs: TokenIds | Activations) -> mx.array:
        """Return the first layer's input [T, H] in the compute dtype. Raises ShardMismatch."""
        config = self._config
        if self._part.part.embedding:
            _check_shape(inputs, (num_tokens,), np.int32)
            if inputs.size and not 0 <= int(inputs.min()) <= int(inputs.max()) < config.vocab_size:
                raise ShardMismatch(
                    "a token id lies outside the vocabulary",
                    fact=f"ids {inputs.min()}-{inputs.max()}, vocabulary {config.vocab_size}",
                )
            return self.embedded(mx.array(inputs))
        kind = self._activation_type
        _check_shape(inputs, (num_tokens, config.hidden_size), kind.numpy)
        arrived = mx.array(inputs)
        return (arrived.view(mx.bfloat16) if kind is ActivationType.BF16 else arrived).astype(self._dtype)

    def embedded(self, ids: mx.array) -> mx.array:
        """Return the rows of the embedding for token ids."""
        assert self._part.embedding is not None
        scale, embedded = self._config.embedding_scale, self._part.embedding.rows(ids)
        return embedded if scale == 1 else embedded * scale

    def leaving(self, hidden: mx.array) -> mx.array:
        """Convert hidden states to the link's type; bf16 as bits, since numpy has no bf16."""
        if self._activation_type is ActivationType.FLOAT32:
            return hidden.astype(mx.float32)
        return hidden.astype(mx.bfloat16).view(mx.uint16)

    def logits(self, finals: mx.array) -> mx.array:
        """Return the logits [R, V] float32 of finals [R, H], the output behind the final norm."""
        config = self._config
        if self._part.head is None or not finals.shape[0]:
            return mx.zeros((0, config.vocab_size), mx.float32)
        logits = self._part.head.logits(finals)
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        cap = config.logit_softcap
        return cap * mx.tanh(logits / cap) if cap else logits

    def scores(self, finals: mx.array, wanted: ScoreRows) -> tuple[mx.array, ...]:
        """Compute the fields of TokenScores of finals [S, H] in pieces, because all logits at once may not fit."""
        pieces: list[list[mx.array]] = []
        for start in range(0, len(wanted.rows), SCORED_AT_ONCE):
            logits = self.logits(finals[start : start + SCORED_AT_ONCE])
            targets = mx.array(wanted.targets[start : start + SCORED_AT_ONCE])[:, None]
            own = mx.take_along_axis(logits, targets, axis=1)[:, 0]
            top_ids = mx.argsort(-logits, axis=1)[:, : wanted.num_top]
            pieces.append([mx.logsumexp(logits, axis=1), own, top_ids, mx.take_along_axis(logits, top_ids, axis=1)])
            mx.eval(pieces[-1])
        return tuple(mx.concatenate(list(field)) for field in zip(*pieces, strict=True))


def _check_shape(inputs: TokenIds | Activations, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> None:
    if inputs.shape != shape or inputs.dtype != np.dtype(dtype):
        raise ShardMismatch(
            "the step's input does not match this slice",
            fact=f"it is {inputs.dtype} {list(inputs.shape)}, the slice needs {np.dtype(dtype)} {list(shape)}",
        )
