"""Multi-head latent attention in its absorbed form: attention over one key-value head, whose values are latents.

T packed rows, H hidden, Hq heads, N and R dimensions of a head's query that do not rotate and that do, C of the latent,
V of a head's output.
"""

from __future__ import annotations

import mlx.core as mx

from edgepipe.spec import layer_spec
from edgepipe.spec.layer_spec import Latent
from edgepipe.spec.layout import K_B, KV_B, V_B
from edgepipe_mlx.attention import LayerStep
from edgepipe_mlx.layer_graphs import Arrays
from edgepipe_mlx.layer_weights import LayerWeights, Norm
from edgepipe_mlx.rope import RotaryEmbedding


class LatentHeads:
    """kv_b, a matrix pair for each head, in the compute dtype."""

    def __init__(self, weights: LayerWeights, latent: Latent, num_heads: int) -> None:
        if latent.joined:
            whole = weights.vector(KV_B).reshape(num_heads, -1, latent.kv_rank)
            self._keys, values = whole[:, : latent.nope_dim], whole[:, latent.nope_dim :]
        else:
            self._keys = weights.vector(K_B).reshape(num_heads, latent.kv_rank, -1).swapaxes(1, 2)
            values = weights.vector(V_B).reshape(num_heads, -1, latent.kv_rank)
        self._values = values.swapaxes(1, 2)

    def absorbed(self, queries: mx.array) -> mx.array:
        """Return what queries [T, Hq, N] multiply latents with: [T, Hq, C]."""
        return (queries.swapaxes(0, 1) @ self._keys).swapaxes(0, 1)

    def outputs(self, attended: mx.array) -> mx.array:
        """Return the heads' outputs [T, Hq * V] for their sums of latents [T, Hq, C]."""
        found = (attended.swapaxes(0, 1) @ self._values).swapaxes(0, 1)
        return found.reshape(found.shape[0], -1)


class LatentAttention:
    """Attention whose keys and values come from one latent per token."""

    def __init__(self, spec: layer_spec.Attention, weights: LayerWeights, rope: RotaryEmbedding | None) -> None:
        assert spec.latent is not None
        assert rope is not None
        self._spec, self._latent, self._rope = spec, spec.latent, rope
        latent_norm = layer_spec.Norm(eps=spec.latent.norm_eps)
        self._query_in, self._query_norm = None, None
        if spec.latent.query_rank:
            self._query_in = weights.linear("self_attn.q_a_proj")
            self._query_norm = Norm(weights.vector("self_attn.q_a_layernorm.weight"), latent_norm)
        self._query = weights.linear("self_attn.q_b_proj" if spec.latent.query_rank else "self_attn.q_proj")
        self._key = weights.linear("self_attn.kv_a_proj_with_mqa")
        self._key_norm = Norm(weights.vector("self_attn.kv_a_layernorm.weight"), latent_norm)
        self._heads = LatentHeads(weights, spec.latent, spec.num_heads)
        self._output = weights.linear("self_attn.o_proj")

    def enter(self, x: mx.array, *positions: mx.array) -> list[mx.array]:
        """Return queries [T, Hq, 1, C + R], keys [T, 1, 1, C + R] and latents [T, 1, 1, C] of x [T, H].

        positions  [T] int32
        """
        (at,) = positions
        key = self._key.multiply(x)
        latent = self._key_norm.rows(key[:, : self._latent.kv_rank])[:, None, None]
        rotated = self._rope.rotate(key[:, None, None, self._latent.kv_rank :], at)
        return [self._queries(x, at), mx.concatenate([latent, rotated], axis=-1), latent]

    def mix(self, entered: Arrays, step: LayerStep) -> list[mx.array]:
        """Write the rows' latents and rotated keys, and attend. Returns sums of latents [T, Hq, 1, C]."""
        queries, keys, latent = entered
        return [step.attend(queries, keys, latent, None)]

    def leave(self, mixed: Arrays) -> mx.array:
        """Return the product [T, H] of what ``mix`` returned."""
        return self._output.multiply(self._heads.outputs(mixed[0].squeeze(2)))

    def _queries(self, x: mx.array, positions: mx.array) -> mx.array:
        """Return queries [T, Hq, 1, C + R] of x [T, H]."""
        if self._query_in is not None and self._query_norm is not None:
            x = self._query_norm.rows(self._query_in.multiply(x))
        size = self._latent.nope_dim + self._latent.rope_dim
        queries = self._query.multiply(x).reshape(-1, self._spec.num_heads, 1, size)
        own, rotating = queries[:, :, 0, : self._latent.nope_dim], queries[..., self._latent.nope_dim :]
        rotated = self._rope.rotate(rotating, positions)
        return mx.concatenate([self._heads.absorbed(own)[:, :, None], rotated], axis=-1)
