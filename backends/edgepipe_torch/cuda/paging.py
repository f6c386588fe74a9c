"""What a device offers for attention over pages and for graphs of its kernels: values that a caller may replace.

CUDA's kernel is torch's variable-length FlashAttention with block tables. It needs torch 2.13, an Ampere or newer card,
bf16, and pages with a multiple of 256 tokens, which FlashAttention-2 requires. It excludes heads of more than 256,
latent attention and capped logits: there, and for all heads with an older torch or with KV as codes, an own kernel
computes single rows (``kernels/paged_decode.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from edgepipe_torch.cuda.kernels.library import own_library
from edgepipe_torch.cuda.kernels.paged_decode import paged_form
from edgepipe_torch.cuda.transfer import CudaTransfer
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.device import PAGE_TOKENS
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv_codes import Codes
from edgepipe_torch.layers.measuring import dtype_name
from edgepipe_torch.layers.transfer import GraphTransfer

_MIN_MAJOR = 8  # compute capability of Ampere
_MAX_HEAD_DIM = 256  # limit of FlashAttention-2
# Rows and pages of up to eight chats with up to 4,096 tokens each; recording takes about 25 ms a size for 32 layers.
_COMMON_SIZES = tuple((rows, pages) for pages in (4, 16) for rows in (1, 2, 4, 8))


class AlsoReturn(NamedTuple):
    """What the kernel returns besides the outputs; read as torch's ``AuxRequest``, whose import takes seconds."""

    lse: bool  # log of the sum of the exponentials of each row's logits, without sinks


class VarlenAttention(Protocol):
    """Attention of N sequences over pages: the part of torch's ``varlen_attn`` that edgepipe calls."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: AlsoReturn | None,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
        num_splits: int | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the heads' outputs [T, Hq, D] in the query's type, with ``return_aux.lse`` also [Hq, T] float32.

        query        [T, Hq, D], rows of all sequences packed
        key, value   [pages, page tokens, Hkv, D], same type
        cu_seq_q     [N + 1] int32, the first row of each sequence
        cu_seq_k     [N + 1] int32, the first key of each sequence as if keys were packed
        max_q, max_k upper bounds of any sequence's rows and keys
        scale        factor on products of query and key
        window_size  keys seen before and after a row's own; -1: all
        seqused_k    [N] int32, keys of each sequence; its last row is at its last key
        block_table  [N, P] int32, each sequence's pages; entries beyond its keys are not read
        num_splits   parts of a sequence's keys that run at once; None: the kernel chooses
        """
        ...


class PagedDecode(Protocol):
    """Attention of R single rows over pages, for heads that ``Paging.fits`` excludes."""

    def __call__(
        self,
        heads: LayerHeads,
        queries: Tensor,
        keys: Tensor | Codes,
        values: Tensor | Codes,
        out: Tensor,
        *,
        rows: Tensor,
        lengths: Tensor,
        tables: Tensor,
    ) -> None:
        """Write the rows' outputs, with window, softcap and sinks of the heads; leave out's other rows as they are.

        queries  [T, Hq, D]
        keys     [pages, page tokens, Hkv, D], same type, or codes; values [pages, page tokens, Hkv, V]
        out      [T, Hq, V], same type
        rows     [R] int32, places in queries and out
        lengths  [R] int32, keys of each row's sequence up to its own
        tables   [R, P] int32, pages; entries beyond a row's keys are not read
        """
        ...


class Graph(Protocol):
    """Recorded kernels at fixed addresses."""

    def replay(self) -> None:
        """Queue the kernels again. This may overwrite results of the recorder's other graphs."""
        ...


class GraphRecorder(Protocol):
    """Records graphs that share one memory pool. Use it from one thread."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Graph]:
        """Record ``compute`` without running its kernels. Returns its result, which each replay fills, and the graph.

        Raises RuntimeError, for example for lack of memory.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs."""

    def __init__(self) -> None:
        self._memory: Any = None  # the pool's handle

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Graph]:
        """Record kernels of the current stream. See GraphRecorder."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = compute()
        self._memory = graph.pool()
        return result, graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """Kernel, recorder and transfer of a device that attends over pages."""

    attend: VarlenAttention | None  # used in layers that it ``fits``; None: torch has none that reads these pages
    decode: Callable[[LayerHeads], PagedDecode]  # used in other layers; raises KernelsUnavailable
    page_tokens: int  # a block holds a multiple of it
    new_recorder: Callable[[], GraphRecorder]
    transfer: GraphTransfer
    recorded_ahead: Sequence[tuple[int, int]] = ()  # rows and pages of graphs that are recorded before the first step

    def fits(self, heads: LayerHeads) -> bool:
        """Return whether ``attend`` computes a layer's attention."""
        excluded = heads.head_dim > _MAX_HEAD_DIM or heads.value_width or heads.softcap
        return self.attend is not None and not excluded


def find_paging(device: torch.device, dtype: torch.dtype, kv: str = "") -> Paging:
    """Return CUDA's paging. ``kv``: form of the KV; empty: the dtype.

    Raises KernelsUnavailable if device or dtype do not support it.
    """
    if device.type != "cuda":
        raise KernelsUnavailable("pages need a CUDA device")
    if dtype != torch.bfloat16:
        raise KernelsUnavailable(f"attention over pages computes in bf16, not {dtype_name(dtype)}")
    major, minor = torch.cuda.get_device_capability(device)
    if major < _MIN_MAJOR:
        name = torch.cuda.get_device_name(device)
        raise KernelsUnavailable(f"attention over pages needs an Ampere or newer card, and {name} is sm_{major}{minor}")
    return Paging(
        attend=_varlen_attention(),
        decode=lambda heads: own_library(device).paged(paged_form(heads, kv)),
        page_tokens=PAGE_TOKENS,
        new_recorder=CudaRecorder,
        transfer=CudaTransfer(device),
        recorded_ahead=_COMMON_SIZES,
    )


def with_codes(paging: Paging) -> Paging:
    """Return the paging of a device whose KV has a form: own kernels read codes, torch's does not."""
    return replace(paging, attend=None)


def _varlen_attention() -> VarlenAttention | None:
    """Return torch's function if it accepts a block table, else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Any = varlen_attn  # its result is a tuple only if the caller asks for more
    return found if "block_table" in inspect.signature(varlen_attn).parameters else None
