"""Attention over pages by the own kernel on an NVIDIA GPU: exactness, and time against reading the keys once."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from edgepipe_torch import TorchBackend
from edgepipe_torch.cuda.kernels.library import CudaLibrary, cuda_library
from edgepipe_torch.cuda.kernels.paged_checking import parted, random_heads, worst_decode_error
from edgepipe_torch.cuda.kernels.paged_decode import PagedForm, paged_form
from edgepipe_torch.cuda.paging import CudaRecorder
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.device import PAGE_TOKENS
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv_codes import codes_of
from figures import Row, below
from torch import Tensor

from edgepipe.backend.types import BackendOptions
from edgepipe.config import kernel_dir
from edgepipe.spec.kv_forms import KV_FORMS, vector_bytes

CONTEXTS = (8_192, 32_768)  # keys
_ROWS = (1, 16)
_MOST_KEYS = 131_072  # keys of all rows together
_UNCACHED_BYTES = 256e6  # keys and values of all layers: more than any GPU caches
_REPLAYS, _ROUNDS = 5, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Heads of a model's layers."""

    head_dim: int
    value_dim: int
    kv_heads: int
    group: int  # query heads of each
    softcap: float = 0.0

    def heads(self, device: torch.device) -> LayerHeads:
        """Describe them."""
        like = PagedForm(head_dim=self.head_dim, value_dim=self.value_dim, head_tiles=1)
        return random_heads(like, device=device, group=self.group, kv_heads=self.kv_heads, softcap=self.softcap)


SHAPES = {
    "gemma-4-31b": Shape(head_dim=512, value_dim=512, kv_heads=4, group=8),
    "glm-4.7-flash": Shape(head_dim=576, value_dim=512, kv_heads=1, group=20),
    "deepseek-v3": Shape(head_dim=576, value_dim=512, kv_heads=1, group=128),
    "capped logits": Shape(head_dim=256, value_dim=256, kv_heads=8, group=2, softcap=50.0),
}


def paged_rows() -> Iterator[Row]:
    """Every form's largest error in units of its bound; then the times of calls in a graph, as a decode step has."""
    device = torch.device("cuda", 0)
    library = cuda_library(device, kernel_dir())
    if isinstance(library, KernelsUnavailable):
        raise library
    for name, shape in SHAPES.items():
        for kv in ("", *KV_FORMS):
            form = paged_form(shape.heads(device), kv)
            worst = worst_decode_error(library.paged(form), form, device)
            text = f"attention by own kernel, heads of {name}"
            yield below(f"{text}, KV in {kv}" if kv else text, worst, "roundings", 1.0)
    backend = TorchBackend(BackendOptions(device="cuda", threads=1))
    bandwidth = backend.profile().bandwidth_bytes_per_s
    backend.close()
    cases = product(SHAPES.items(), CONTEXTS, _ROWS, ("", *KV_FORMS))
    for (name, shape), context, rows, kv in cases:
        if rows * context > _MOST_KEYS:
            continue
        layers = Layers(shape, library, device, rows=rows, context=context, kv=kv)
        call_s, memory_s = layers.call_s(), layers.read_bytes / bandwidth
        text = f"attention, heads of {name}, {rows} row{'s' if rows > 1 else ''}, {context} keys"
        text = f"{text}, KV in {kv}" if kv else text
        yield Row(text, 1e6 * call_s, "us", 1e6 * memory_s, "memory time", call_s / memory_s)


class Layers:
    """Pages of more layers than any cache holds; a row of a graph's step reads those of each layer."""

    def __init__(
        self, shape: Shape, library: CudaLibrary, device: torch.device, *, rows: int, context: int, kv: str
    ) -> None:
        """``kv``: form of the KV; empty: bf16."""
        self._heads = heads = shape.heads(device)
        self._kernel = library.paged(paged_form(heads, kv))
        pages, sizes = context // PAGE_TOKENS, (heads.head_dim, heads.value_width)
        self.read_bytes = rows * context * heads.entries * vector_bytes(kv or "bfloat16", *sizes)  # read by one call
        self._count = max(2, -int(-_UNCACHED_BYTES // self.read_bytes))
        shape_of_one = rows * pages, PAGE_TOKENS, heads.entries, heads.head_dim
        made = (torch.randn(shape_of_one, dtype=torch.bfloat16, device=device) for _ in range(self._count))
        self._pools = [codes_of(kv, *sizes).encode(each) if kv else each for each in made]
        self._queries = torch.randn(rows, heads.num_heads, heads.head_dim, dtype=torch.bfloat16, device=device)
        self._out = torch.empty(rows, heads.num_heads, heads.out_dim, dtype=torch.bfloat16, device=device)
        places = torch.randperm(rows * pages, device=device).int().view(rows, pages)
        self._given = {
            "rows": torch.arange(rows, dtype=torch.int32, device=device),
            "lengths": torch.full((rows,), context, dtype=torch.int32, device=device),
            "tables": places,
        }

    def call_s(self) -> float:
        """Seconds of one layer's call, the median of some rounds' means."""
        self._attend()
        _, graph = CudaRecorder().record(self._attend)
        graph.replay()

        def run() -> float:
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            for _ in range(_REPLAYS):
                graph.replay()
            ended.record()
            ended.synchronize()
            return begun.elapsed_time(ended) / 1e3 / _REPLAYS / self._count

        return statistics.median(run() for _ in range(_ROUNDS))

    def _attend(self) -> Tensor:
        for pool in self._pools:
            keys, values = parted(pool, self._heads)
            self._kernel(self._heads, self._queries, keys, values, self._out, **self._given)
        return self._out
