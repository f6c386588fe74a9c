"""Multi-head latent attention in its absorbed form: attention over one key-value head, whose values are latents.

T packed rows, Hq heads, N and R dimensions of a head's query that do not rotate and that do, C of the latent, V of a
head's output. D = C + R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.spec.layer_spec import Attention
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.linear import HeldWeight, Linear, Workspace
from edgepipe_torch.layers.mixers import SliceStep
from edgepipe_torch.layers.step_ops import rotate


class LatentAttention:
    """See ``LayerMixer``."""

    def __init__(
        self,
        attention: Attention,
        heads: LayerHeads,
        projections: Linear,
        query: Linear | None,
        output: Linear,
        *,
        rotation: int,
        temperature: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        projections            both input products
        query                  the second of two query products; None: there is one
        rotation, temperature  indices among the step's rotations, see ``SliceStep.attend``
        """
        assert attention.latent is not None
        self.heads = heads
        self.output = output
        self._projections = projections
        self._rotation = rotation
        self._temperature = temperature
        self._interleaved = attention.interleaved
        self._latent = latent = attention.latent
        self.query = query
        rank = latent.kv_rank
        self.query_norm = torch.empty(latent.query_rank, dtype=dtype, device=device)
        self.key_norm = torch.empty(rank, dtype=dtype, device=device)
        self._keys = torch.empty(heads.num_heads, latent.nope_dim, rank, dtype=dtype, device=device)
        self._values = torch.empty(heads.num_heads, rank, latent.value_dim, dtype=dtype, device=device)

    def fill_joined(self, weight: Tensor) -> None:
        """Copy kv_b [Hq * (N + V), C] from host memory."""
        whole = weight.view(self._keys.shape[0], -1, self._latent.kv_rank)
        self._keys.copy_(whole[:, : self._latent.nope_dim])
        self._values.copy_(whole[:, self._latent.nope_dim :].transpose(1, 2))

    def fill_keys(self, weight: Tensor) -> None:
        """Copy the keys' part [Hq * C, N] from host memory."""
        self._keys.copy_(weight.view(self._keys.shape[0], -1, self._latent.nope_dim).transpose(1, 2))

    def fill_values(self, weight: Tensor) -> None:
        """Copy the values' part [Hq * V, C] from host memory."""
        self._values.copy_(weight.view(self._keys.shape[0], -1, self._latent.kv_rank).transpose(1, 2))

    @property
    def products(self) -> tuple[Linear, Linear]:
        return self._projections, self.output

    @property
    def linears(self) -> Sequence[HeldWeight]:
        return (*self.products, self.query) if self.query is not None else self.products

    def rows(self, x: Tensor, step: SliceStep) -> Tensor:
        rotations, projected = step.tensors.rotations[self._rotation], self._projections.rows(x)
        parts = step.ops.compute(lambda: self._parts(projected, rotations, step.workspace))
        out = step.attend(self.heads, parts, None, self._temperature)
        return step.ops.compute(lambda: self._outputs(out))

    def _parts(self, projected: Tensor, rotations: Tensor, workspace: Workspace) -> Tensor:
        """Return a step's queries and, last, its keys [T, Hq + 1, D], rotated; valid until the next layer's.

        projected  [T, query features + D]
        rotations  [T, 1, R / 2] complex64
        workspace  the caller's own: a graph that records this must find its memory again
        """
        latent, rank = self._latent, self._latent.kv_rank
        num_rows, num_heads, size = projected.shape[0], self._keys.shape[0], rank + latent.rope_dim
        asked, key = projected[:, :-size], projected[:, -size:]
        if self.query is not None:
            asked = self.query.rows(_normed(asked, self.query_norm, latent.norm_eps))
        queries = asked.reshape(num_rows, num_heads, latent.nope_dim + latent.rope_dim)
        parts = workspace.get("latent parts", num_rows, num_heads + 1, size)
        absorbed = torch.bmm(queries[..., : latent.nope_dim].transpose(0, 1), self._keys)
        parts[:, :-1, :rank].copy_(absorbed.transpose(0, 1))
        parts[:, :-1, rank:].copy_(self._paired(queries[..., latent.nope_dim :]))
        parts[:, -1, :rank].copy_(_normed(key[:, :rank], self.key_norm, latent.norm_eps))
        parts[:, -1, rank:].copy_(self._paired(key[:, rank:]))
        rotate(parts[..., rank:], rotations)
        return parts

    def _outputs(self, attended: Tensor) -> Tensor:
        """Return the heads' outputs [T, Hq * V] for their sums of latents [T, Hq * C]."""
        sums = attended.view(attended.shape[0], -1, self._latent.kv_rank).transpose(0, 1)
        return torch.bmm(sums, self._values).transpose(0, 1).reshape(attended.shape[0], -1)

    def _paired(self, x: Tensor) -> Tensor:
        """Return x [..., R] with the two numbers of a rotary pair side by side."""
        return x if self._interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
