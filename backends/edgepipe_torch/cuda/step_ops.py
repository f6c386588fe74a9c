"""Small operations of a step on CUDA: own kernels where they compute, else torch's operations."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from edgepipe.spec.facts import ModelConfig
from edgepipe_torch.cuda.kernels.library import PlaceLibrary, own_library
from edgepipe_torch.cuda.kernels.place_heads import FourBitHeads, PlaceHeads, can_place, can_place_four_bits
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv import KVPool
from edgepipe_torch.layers.kv_codes import FourBits
from edgepipe_torch.layers.packed_attention import StepRests
from edgepipe_torch.layers.packed_kv import PackedKVStorage
from edgepipe_torch.layers.step_ops import NO_NORMS, HeadNorms, StepOps, TorchOps

logger = logging.getLogger(__name__)


class CudaOps(TorchOps):
    """Norms of heads, rotation, and writing keys and values in one launch, from bf16."""

    def __init__(self, config: ModelConfig, place_heads: PlaceHeads) -> None:
        super().__init__(config)
        self._place_heads = place_heads
        self._eps = config.norm.eps if config.norm.kind == "rms" else None

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
        form = pool.form(heads) if isinstance(pool, PackedKVStorage) else None
        four_bits: FourBitHeads | None = None
        fits = can_place(qkv) and self._computes(norms, heads)
        if isinstance(form, FourBits) and isinstance(pool, PackedKVStorage):
            fits = fits and can_place_four_bits(heads.head_dim, form)
            # A graph keeps no memory that another step replaces, so it writes lower bits to the pool alone.
            staged = pool.rests(heads, qkv.shape[0]) if rests is None or rests.tokens is not None else None
            kept = None if rests is None or rests.tokens is not None else rests.slots
            four_bits = FourBitHeads(block=form.block, rests=staged, rest_slots=kept)
        if not fits:
            super().place(qkv, rotations, slots, pool, heads, norms, rests)
            return
        self._place_heads(
            qkv,
            rotations,
            slots,
            *pool.arrays(heads.layer),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            norms=norms,
            eps=self._eps or 0.0,
            four_bits=four_bits,
        )
        if rests is not None and rests.tokens is not None:
            rests.keep(heads)

    def _computes(self, norms: HeadNorms, heads: LayerHeads) -> bool:
        """Return whether the kernel computes the norms: RMS norms of each head on its own."""
        weights = [each for each in norms if each is not None]
        return not weights or (self._eps is not None and all(each.shape[0] == heads.head_dim for each in weights))


def make_ops(
    config: ModelConfig, library: PlaceLibrary | None, place: torch.device, dtype: torch.dtype, kv: str = ""
) -> StepOps:
    """Return a device's operations. The first call may take seconds.

    library  None: the device's own kernels
    kv       form of the KV; empty: the dtype
    """
    if dtype != torch.bfloat16 or (library is None and place.type != "cuda"):
        return TorchOps(config)
    try:
        return CudaOps(config, (library or own_library(place)).place_heads(kv))
    except KernelsUnavailable as exc:
        logger.warning("torch's operations rotate queries and keys, in more launches: %s", exc)
        return TorchOps(config)
