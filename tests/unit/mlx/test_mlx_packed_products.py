"""MLX reports what multiplies with packed weights."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

from edgepipe_mlx import MlxBackend

from edgepipe.backend.types import PackedProducts
from edgepipe.spec.facts import LayerRange, make_slices
from tests.support.backends.mlx_models import cpu_options, tiny_config
from tests.support.models.packed import PackedTinyModel

MLX = PackedProducts(by="MLX")
REASON = "MLX multiplies no packed weights of 48 inputs"
WIDENED = PackedProducts(by="MLX (weights widened as they load)", reason=REASON)


@pytest.mark.parametrize(
    ("mix", "weights", "expected"),
    [
        ({"": "Q4_0"}, "auto", (MLX,)),
        ({"o_proj.weight": "NVFP4", "": "Q4_0"}, "auto", (MLX, WIDENED)),
        ({"o_proj.weight": "NVFP4"}, "auto", (WIDENED,)),
        ({"": "F16"}, "auto", ()),
        ({"": "Q4_0"}, "wide", ()),
    ],
)
def test_products_are_reported_by_the_inputs_that_mlx_knows(
    mix: dict[str, str], weights: str, expected: tuple[PackedProducts, ...]
) -> None:
    heads = 3 if "o_proj.weight" in mix else 4  # its inputs are 48 or 64
    config = tiny_config(hidden_size=64, intermediate_size=64, num_heads=heads, num_kv_heads=1, head_dim=16)
    backend = MlxBackend(cpu_options(weights=weights))
    [part] = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    backend.load([part], PackedTinyModel(config, mix), lambda _progress: None)
    assert backend.packed_products() == expected
    backend.close()
    assert backend.packed_products() == ()
