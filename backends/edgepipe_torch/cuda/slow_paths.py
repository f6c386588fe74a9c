"""Why steps on a GPU run without pages or without graphs, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgepipe.backend.types import SlowPath
from edgepipe_torch.cuda.paging import Paging
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.decoder import SliceWeights

_NO_PAGES = "attention runs sequence by sequence, and decode steps without CUDA graphs"
_NO_GRAPHS = "decode steps run without CUDA graphs"
_COST = "an H100 decoded a small model at 64 instead of 687 tok/s for one chat, 316 instead of 6,945 for sixteen"


def no_paging(reason: KernelsUnavailable) -> SlowPath:
    """Return what a device without paging lacks."""
    return SlowPath(what=_NO_PAGES, cost=_COST, reason=str(reason), remedy=reason.remedy)


def slow_paths(paging: Paging, weights: Sequence[SliceWeights], block_size: int) -> Iterator[SlowPath]:
    """Yield what slices lack on a device with paging. Loads their kernels, which may take seconds."""
    if block_size % paging.page_tokens:
        reason = f"a KV block of this model has {block_size} tokens, and pages have {paging.page_tokens}"
        yield SlowPath(what=_NO_PAGES, cost=_COST, reason=reason)
        return
    seen: set[tuple[int, int]] = set()
    for heads in (each for part in weights for each in part.heads):
        size = heads.head_dim, heads.out_dim
        if paging.fits(heads) or size in seen:
            continue
        seen.add(size)
        try:
            paging.decode(heads)
        except KernelsUnavailable as exc:
            yield no_paging(exc)
    if any(part.waits for part in weights):
        yield SlowPath(what=_NO_GRAPHS, cost=_COST, reason="its experts are computed after a wait for the device")
