"""The backend's own kernels for the weights and the layers at hand. Metal runs them once they have passed a check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from edgepipe.backend.types import KernelError, PackedProducts, SlowPath
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.tensors import WeightInfo
from edgepipe.weights.resident import keeps_blocks
from edgepipe_mlx.attention import LayerPages
from edgepipe_mlx.blocks.checking import block_errors, checked_kernels
from edgepipe_mlx.blocks.kernels import BlockKernels
from edgepipe_mlx.device import is_cpu
from edgepipe_mlx.packing import mlx_form
from edgepipe_mlx.pages.checking import checked_pages, page_errors
from edgepipe_mlx.pages.kernels import PageKernels
from edgepipe_mlx.pages.rows import PageForm, page_form


class OwnKernels:
    """Kernels of K types and of attention over pages, each checked when it is first asked for."""

    def __init__(self, device: mx.Device, dtype: mx.Dtype, *, products: bool, attention: bool, kv: str) -> None:
        """``products``, ``attention``: the options allow own kernels for these."""
        self._dtype = dtype
        self._kv = kv
        self._products = products and not is_cpu(device)
        self._attention = attention and not is_cpu(device)
        self._checked: BlockKernels | SlowPath | None = None  # None: not checked yet
        # Forms of attention that were checked, and what came of it.
        self._checked_pages: tuple[frozenset[PageForm], PageKernels | SlowPath] | None = None

    def blocks(self) -> BlockKernels | None:
        """Return the kernels of K types, once they are checked; None: MLX's own kernels take their place."""
        if not self._products:
            return None
        if self._checked is None:
            self._checked = checked_kernels(self._dtype)
        return None if isinstance(self._checked, SlowPath) else self._checked

    def errors(self) -> Iterator[KernelError]:
        """Compare the own kernels with float64. See ``CheckingBackend``."""
        if self.blocks() is not None:
            yield from block_errors(self._dtype)
        elif isinstance(self._checked, SlowPath):
            yield KernelError(kernel="products of K types at their own size", reason=self._checked.reason)
        if self._attention:
            yield from page_errors(self._dtype)

    def products(self, infos: Sequence[WeightInfo]) -> tuple[PackedProducts, ...]:
        """Return what multiplies with the weights that have a form, the fallback last."""
        found: list[PackedProducts] = []
        if self.blocks() is not None and any(_is_of_blocks(info) for info in infos):
            found.append(PackedProducts(by="own kernels (Metal)"))
            infos = [info for info in infos if not _is_of_blocks(info)]
        packed = [(info.form, info.shape[1]) for info in infos if info.form is not None]
        widened = {inputs for form, inputs in packed if mlx_form(form, inputs) is None}
        if any(inputs not in widened for _, inputs in packed):
            found.append(PackedProducts(by="MLX"))
        if widened:
            reason = f"MLX multiplies no packed weights of {' or '.join(map(str, sorted(widened)))} inputs"
            found.append(PackedProducts(by="MLX (weights widened as they load)", reason=reason))
        return tuple(found)

    def slow_products(self, infos: Sequence[WeightInfo]) -> tuple[SlowPath, ...]:
        """Return why weights of K types lack own kernels; empty: there is no such weight, or the kernels work."""
        found = self._checked
        return (found,) if isinstance(found, SlowPath) and any(_is_of_blocks(info) for info in infos) else ()

    def slow_attention(self, config: ModelConfig, layers: Sequence[int], block_size: int) -> tuple[SlowPath, ...]:
        """Return why these layers lack own kernels for attention over pages; empty: they have them, or need none."""
        _, found = self._page_kernels(config, layers, block_size)
        return (found,) if isinstance(found, SlowPath) else ()

    def pages(self, config: ModelConfig, layers: Sequence[int], block_size: int) -> dict[int, LayerPages]:
        """Return how these layers attend over pages, by index; no layer does where a kernel failed its check."""
        forms, kernels = self._page_kernels(config, layers, block_size)
        if kernels is None or isinstance(kernels, SlowPath):
            return {}
        found: dict[int, LayerPages] = {}
        for index, form in forms.items():
            spec = config.layers[index].attention
            assert spec is not None
            found[index] = LayerPages(kernels=kernels, form=form, scale=spec.logit_scale, cap=spec.softcap)
        return found

    def _page_kernels(
        self, config: ModelConfig, layers: Sequence[int], block_size: int
    ) -> tuple[dict[int, PageForm], PageKernels | SlowPath | None]:
        """Return the layers' forms of attention, and the kernels for these, once they are checked."""
        if not self._attention:
            return {}, None
        forms: dict[int, PageForm] = {}
        for index in layers:
            spec = config.layers[index].attention
            form = spec and page_form(spec, block_size=block_size, dtype=self._dtype, kv=self._kv)
            if form is not None:
                forms[index] = form
        wanted = frozenset(forms.values())
        if self._checked_pages is None or self._checked_pages[0] != wanted:
            self._checked_pages = wanted, checked_pages(wanted)
        return forms, self._checked_pages[1]


def _is_of_blocks(info: WeightInfo) -> bool:
    return info.form is not None and keeps_blocks(info.form, *info.shape)
