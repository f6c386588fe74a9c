"""Small operations of a step between its products, by torch.

T rows, H hidden, Hq and Hkv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.errors import ArchitectureUnsupported
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Norm
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv import KVPool
from edgepipe_torch.layers.packed_attention import StepRests


class HeadNorms(NamedTuple):
    """Weights of the norms of a row's heads, as ``StepOps.norm_heads`` takes them; None: heads that have no norm."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None


NO_NORMS = HeadNorms()


def norm_of(spec: Norm) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that normalises the last axis of x [..., n] and multiplies it by a weight [n].

    Raises ArchitectureUnsupported for a kind of norm that torch's operations do not compute here.
    """
    match spec.kind:
        case "rms":
            return lambda x, weight: F.rms_norm(x, weight.shape, weight, spec.eps)
        case "layer":
            return lambda x, weight: F.layer_norm(x, weight.shape, weight, None, spec.eps)
        case unknown:
            raise ArchitectureUnsupported(
                f"the torch backend does not compute norms of the kind '{unknown}'", fact="it computes rms and layer"
            )


class StepOps(Protocol):
    """Operations that a decoder needs."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the model's norm of x [T, H], valid until the next call."""
        ...

    def norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        """Normalise heads [T, n, D], a view of some of a row's heads, in place.

        weight [D]: each head on its own; or [n D]: all together.
        """
        ...

    def place(
        self,
        qkv: Tensor,
        rotations: Tensor | None,
        slots: Tensor,
        pool: KVPool,
        heads: LayerHeads,
        norms: HeadNorms = NO_NORMS,
        rests: StepRests | None = None,
    ) -> None:
        """Normalise heads and rotate queries and keys; write keys and values to the pool's slots [T].

        qkv        [T, Hq + 2 Hkv, D]; its queries become what attention takes, its keys and values are undefined
        rotations  [T, 1, pairs] complex64, of the first pairs of each head; None: nothing rotates
        rests      where lower bits go, in a pool whose newest tokens have more bits
        """
        ...

    def compute(self, work: Callable[[], Tensor]) -> Tensor:
        """Run other operations and return their result. They read and write the same tensors when they are repeated."""
        ...


class TorchOps:
    """Computes with torch's operations, on any device and in any dtype."""

    def __init__(self, config: ModelConfig) -> None:
        self._norm = norm_of(config.norm)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._norm(x, weight)

    def norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        if weight.shape[0] != heads.shape[-1]:
            heads = heads.view(heads.shape[0], -1)
        heads.copy_(self.norm(heads, weight))

    def place(
        self,
        qkv: Tensor,
        rotations: Tensor | None,
        slots: Tensor,
        pool: KVPool,
        heads: LayerHeads,
        norms: HeadNorms = NO_NORMS,
        rests: StepRests | None = None,
    ) -> None:
        norm_parts(self, qkv, heads, norms)
        if rotations is not None:
            rotate(qkv[:, : heads.num_heads + heads.num_kv_heads, : 2 * rotations.shape[-1]], rotations)
        if rests is None:
            pool.write(heads.layer, slots, qkv[:, heads.num_heads :])
        else:
            rests.write(heads, slots, qkv[:, heads.num_heads :])

    def compute(self, work: Callable[[], Tensor]) -> Tensor:
        return work()


def norm_parts(ops: StepOps, qkv: Tensor, heads: LayerHeads, norms: HeadNorms) -> None:
    """Normalise the heads of qkv [T, Hq + 2 Hkv, D] in place."""
    keys, values = heads.num_heads, heads.num_heads + heads.num_kv_heads
    for part, weight in zip((slice(keys), slice(keys, values), slice(values, None)), norms, strict=True):
        if weight is not None:
            ops.norm_heads(qkv[:, part], weight)


def rotate(heads: Tensor, rotations: Tensor) -> None:
    """Rotate heads [T, heads, D] in place; pairs are adjacent. rotations [T, 1, D / 2] complex64."""
    if heads.dtype == torch.float32:
        torch.view_as_complex(heads.unflatten(-1, (-1, 2))).mul_(rotations)
        return
    turned = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2))).mul_(rotations)
    heads.copy_(torch.view_as_real(turned).flatten(-2))
