"""Attention of single rows over pages on CUDA: which heads the kernel computes, with how many blocks.

R rows, Hq and Hkv heads, G = Hq / Hkv, D numbers of a key, V of a value, P pages of a table.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from edgepipe.spec.kv_forms import KV_4BIT, KV_8BIT, four_bits, pages_fit
from edgepipe_torch.cuda.kernels.driver import SHARED_BYTES, Module
from edgepipe_torch.cuda.kernels.products import WARPS
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv_codes import Codes

TILE_KEYS = 64

_HEAD_TILES = (1, 2, 4)  # sizes in tiles of 16 heads of a block
_MOST_PARTS = 256
_ALIGNED_BYTES, _ALIGNED_NUMBERS = 16, 8  # alignment of one read, which takes 8 numbers of bf16
_BITS = {"": 16, KV_8BIT: 8, KV_4BIT: 4}  # bits of a number, by the form of KV
_TYPES = {"": torch.bfloat16, KV_8BIT: torch.int8, KV_4BIT: torch.uint8}


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedForm:
    """What the kernel is compiled for."""

    head_dim: int  # D
    value_dim: int  # V
    head_tiles: int  # a block has 16 times as many heads
    kv: str = ""  # form of the KV, of those with own kernels; empty: bf16

    @property
    def macros(self) -> dict[str, str]:
        """Names and values to define."""
        macros = {
            "HEAD_DIM": str(self.head_dim),
            "VALUE_DIM": str(self.value_dim),
            "HEAD_TILES": str(self.head_tiles),
            "KV_BITS": str(_BITS[self.kv]),
        }
        if self.kv == KV_4BIT:
            block = four_bits(self.head_dim, self.value_width).block
            macros |= {"BLOCK": str(block), "BLOCK_SCALE": f"{(block**-0.5).hex()}f"}
        return macros

    @property
    def value_width(self) -> int:
        """Leading numbers of a key that are its value; 0: values are apart."""
        return 0 if self.value_dim == self.head_dim else self.value_dim

    @property
    def block_heads(self) -> int:
        """Query heads of a block."""
        return 16 * self.head_tiles

    @property
    def shared_bytes(self) -> int:
        """A block's queries, its weights for a tile of keys, and one float of each warp for each head.

        With 4 bits, the results of 16 heads take their place.
        """
        pitch = self.head_dim + 32 if self.head_dim % 64 == 0 else self.head_dim
        results = 4 * 16 * (self.value_dim + 8) if self.kv == KV_4BIT else 0
        return max(self.block_heads * (2 * pitch + 2 * (TILE_KEYS + 16) + 4 * WARPS), results)

    @property
    def merged_bytes(self) -> int:
        """Shared memory of the second pass beside the parts' factors."""
        return 4 * self.value_dim if self.kv == KV_4BIT else 0


def paged_form(heads: LayerHeads, kv: str = "") -> PagedForm:
    """Return what to compile for a layer's heads. ``kv``: see ``PagedForm``. Raises KernelsUnavailable."""
    if not pages_fit(heads.head_dim, heads.out_dim, kv):
        sizes = "powers of two from 128 on" if kv == KV_4BIT else "multiples of 128"
        raise KernelsUnavailable(
            f"own kernels need keys with multiples of 32 numbers and values of 64 or {sizes},"
            f" not {heads.head_dim} and {heads.out_dim}"
        )
    forms = [
        PagedForm(head_dim=heads.head_dim, value_dim=heads.out_dim, head_tiles=tiles, kv=kv) for tiles in _HEAD_TILES
    ]
    fitting = [form for form in forms if form.shared_bytes <= SHARED_BYTES]
    if not fitting:
        raise KernelsUnavailable(f"own kernels need keys that fit shared memory, not of {heads.head_dim} numbers")
    group = heads.num_heads // heads.num_kv_heads
    return next((form for form in fitting if form.block_heads >= group), fitting[-1])


class PagedDecode:
    """The kernels of one form on one device. See ``paging.PagedDecode``."""

    def __init__(self, module: Module, form: PagedForm, *, multiprocessors: int) -> None:
        self._module = module
        self.form = form
        self._multiprocessors = multiprocessors

    def as_on(self, *, multiprocessors: int) -> PagedDecode:
        """Return the same kernels, with as many blocks as a device of another size gets."""
        return PagedDecode(self._module, self.form, multiprocessors=multiprocessors)

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
        """Attend. Sizes alone decide the launches, so that a graph may hold them; pages have multiples of 64 tokens."""
        keys, key_scales = _parts(keys)
        values, value_scales = _parts(values)
        assert keys.dtype == values.dtype == _TYPES[self.form.kv]
        assert keys.shape[1] % TILE_KEYS == 0
        assert values.stride() == keys.stride() == _page_strides(keys)
        assert not any(part.data_ptr() % _ALIGNED_BYTES or part.stride(1) % _ALIGNED_NUMBERS for part in (keys, values))
        scales = _Scales()
        if key_scales is not None and value_scales is not None:
            stride = key_scales.stride(1)
            of_head = (1,) if key_scales.dim() == 3 else (key_scales.shape[3], 1)
            assert value_scales.stride() == key_scales.stride() == (keys.shape[1] * stride, stride, *of_head)
            scales = _Scales(keys=key_scales.data_ptr(), values=value_scales.data_ptr(), stride=stride)
        assert out.stride()[1:] == (heads.out_dim, 1)
        if not _reads_whole_pieces(queries):
            queries = queries.clone(memory_format=torch.contiguous_format)
        count, head_blocks = rows.shape[0], -(-heads.num_heads // heads.num_kv_heads // self.form.block_heads)
        blocks = count * heads.num_kv_heads * head_blocks
        most_keys = tables.shape[1] * keys.shape[1]
        if heads.window:
            most_keys = min(most_keys, heads.window + TILE_KEYS)  # a window may begin within a tile
        parts = part_count(self.form, blocks, most_keys, self._multiprocessors)
        places = count * heads.num_heads * parts if parts > 1 else 0
        sums = torch.empty(places, self.form.value_dim, dtype=torch.float32, device=out.device)
        totals = torch.empty(places, 2, dtype=torch.float32, device=out.device)
        given = _Sequences(
            queries=queries.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            rows=rows.data_ptr(),
            lengths=lengths.data_ptr(),
            tables=tables.data_ptr(),
            sinks=None if heads.sinks is None else heads.sinks.data_ptr(),
            out=out.data_ptr(),
            sums=sums.data_ptr(),
            totals=totals.data_ptr(),
            query_stride=queries.stride(0),
            token_stride=keys.stride(1),
            out_stride=out.stride(0),
            heads=heads.num_heads,
            kv_heads=heads.num_kv_heads,
            page_tokens=keys.shape[1],
            table_width=tables.shape[1],
            window=heads.window or 0,
            parts=parts,
            scale=heads.scale,
            softcap=heads.softcap,
        )
        self._module.launch(
            "attend_parts",
            blocks=blocks * parts,
            shared_bytes=self.form.shared_bytes,
            arguments=(given, ctypes.c_int(head_blocks), scales),
        )
        if parts > 1:
            self._module.launch(
                "merge_parts",
                blocks=count * heads.num_heads,
                shared_bytes=4 * parts + self.form.merged_bytes,
                arguments=(given,),
            )


def _parts(kept: Tensor | Codes) -> tuple[Tensor, Tensor | None]:
    """Return numbers, and their scales if they are codes."""
    return (kept.codes, kept.scales) if isinstance(kept, Codes) else (kept, None)


def _page_strides(keys: Tensor) -> tuple[int, ...]:
    """Return the strides of pages without gaps between them, with a token's heads side by side."""
    return keys.shape[1] * keys.stride(1), keys.stride(1), keys.shape[3], 1


def _reads_whole_pieces(queries: Tensor) -> bool:
    """Return whether the kernel can read queries where they are."""
    aligned = queries.data_ptr() % _ALIGNED_BYTES == 0 and queries.stride(0) % _ALIGNED_NUMBERS == 0
    return aligned and queries.stride()[1:] == (queries.shape[2], 1)


def part_count(form: PagedForm, blocks: int, most_keys: int, multiprocessors: int) -> int:
    """Return into how many parts to split keys, so that ``blocks`` for each part fill the multiprocessors.

    A multiprocessor holds two blocks of 16 heads, or one of more. A part has a tile for each 16 heads, at least.
    """
    wanted = multiprocessors * (2 if form.head_tiles == 1 else 1)
    most = -(-most_keys // (TILE_KEYS * form.head_tiles))
    return max(1, min(-(-wanted // blocks), most, _MOST_PARTS))


class _Sequences(ctypes.Structure):
    """``Sequences`` of paged_decode.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "queries",
                "keys",
                "values",
                "rows",
                "lengths",
                "tables",
                "sinks",
                "out",
                "sums",
                "totals",
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                "query_stride",
                "token_stride",
                "out_stride",
                "heads",
                "kv_heads",
                "page_tokens",
                "table_width",
                "window",
                "parts",
            )
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Scales(ctypes.Structure):
    """``Scales`` of paged_decode.cu."""

    _fields_ = (("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("stride", ctypes.c_int))
