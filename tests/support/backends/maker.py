"""Makes the backends that the contract tests run against, and compares what they give."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from edgepipe.backend.loader import create_backend
from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.errors import BackendUnavailable
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.kv_forms import rest_tokens
from edgepipe.testing.tiny_model import TinyWeights, tiny_config
from tests.support.backends.roomy import RoomyBackend

NUM_BLOCKS = 12


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes loaded backends of one kind and says how alike two of its results must be. Equal: of the same kind."""

    name: str  # name of the entry point
    device: str
    dtype: str = "float32"
    block_size: int = 16  # tokens
    paged_on_cpu: bool = False  # torch, with the CPU as a device that has pages and graphs
    kv: str = ""  # the setting of that name
    made: list[Backend] = field(compare=False)

    def bare(self, *, kind: ActivationType = ActivationType.FLOAT32) -> Backend:
        """A backend that has loaded nothing. Skips the test where its library is missing."""
        options = BackendOptions(
            device=self.device,
            dtype=self.dtype,
            kv=self.kv,
            activation_type=kind,
            threads=1,
            settings={"time_factor": "0"} if self.name == "emulated" else {},
        )
        try:
            backend = self._paged(options) if self.paged_on_cpu else create_backend(self.name, options)
        except BackendUnavailable as exc:
            pytest.skip(f"{self.name} on {self.device}: {exc.fact or exc.what}")
        self.made.append(backend)
        return cast("Backend", RoomyBackend(backend)) if rest_tokens(self.kv) else backend

    def loaded(
        self,
        config: ModelConfig,
        *,
        cuts: Sequence[int] = (),
        take: Sequence[int] | None = None,
        kind: ActivationType = ActivationType.FLOAT32,
    ) -> Backend:
        """A backend that has loaded the slices ``take`` (None: all) of a model cut before the layers ``cuts``."""
        backend = self.bare(kind=kind)
        slices = cut(config, cuts)
        chosen = slices if take is None else [slices[index] for index in take]
        backend.load(chosen, TinyWeights(config), lambda _progress: None)
        backend.allocate_kv(num_blocks=NUM_BLOCKS, block_size=self.block_size)
        return backend

    def _paged(self, options: BackendOptions) -> Backend:
        pytest.importorskip("torch")
        from edgepipe_torch import TorchBackend

        from tests.support.backends.torch_paging import CudaOnHost, cpu_paging

        paging = cpu_paging(page_tokens=self.block_size)
        return TorchBackend(options, device=CudaOnHost(options.dtype, paging=paging))

    def assert_same(self, actual: np.ndarray, expected: np.ndarray) -> None:
        """Exactly equal for integers; where kernels round, within a small part of the largest value."""
        if self.name == "emulated":
            np.testing.assert_array_equal(actual, expected)
        else:
            np.testing.assert_allclose(actual, expected, rtol=0, atol=self.rounding * float(np.abs(expected).max()))

    def assert_different(self, actual: np.ndarray, expected: np.ndarray) -> None:
        """Farther apart than rounding explains."""
        assert actual.shape == expected.shape
        assert float(np.abs(actual - expected).max()) > max(1e-2, 2 * self.rounding) * float(np.abs(expected).max())

    @property
    def rounding(self) -> float:
        """Largest difference that rounding explains, as a part of the largest value.

        Two bf16 kernels of attention differ by up to 0.11 after these four layers; a wrong key changes 0.9 and more.
        With KV as codes, sums that differ in their last bit may give neighbouring codes: one of 8 bits changed 7e-4.
        """
        if self.dtype != "float32":
            return 0.2
        return {"8bit": 3e-3, "4bit": 5e-2}.get(self.kv, 2e-4)


def cut(config: ModelConfig, cuts: Sequence[int]) -> tuple[Slice, ...]:
    """The slices of a model cut before the layers ``cuts``."""
    bounds = [0, *cuts, config.num_layers]
    ranges = [LayerRange(start, end) for start, end in itertools.pairwise(bounds)]
    return make_slices(ranges, config.num_layers)


CONFIGS: dict[str, Callable[[], ModelConfig]] = {
    "llama": tiny_config,
    "mistral with a window": lambda: tiny_config(architecture="mistral", windows=(6,)),
    "qwen2 with biases, tied": lambda: tiny_config(architecture="qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3 with norms": lambda: tiny_config(architecture="qwen3", qk_norm=True, num_kv_heads=4),
}
