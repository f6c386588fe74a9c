"""MLX's products of packed weights are compared with the values that the device keeps."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")

from edgepipe_mlx import MlxBackend, kernel_errors  # noqa: E402
from edgepipe_mlx.matrices import PackedMatrix  # noqa: E402

from edgepipe.backend.protocol import CheckingBackend  # noqa: E402
from edgepipe.backend.types import BackendOptions  # noqa: E402

TYPES = ("Q4_K", "Q6_K", "MXFP4")


@pytest.fixture(autouse=True)
def few_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_errors, "CHECKED_TYPES", TYPES)
    monkeypatch.setattr(kernel_errors, "_ROWS", (1, 5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_type_is_within_its_bound(dtype: str) -> None:
    backend = MlxBackend(BackendOptions(device="cpu", dtype=dtype))
    assert isinstance(backend, CheckingBackend)
    found = list(backend.kernel_errors())
    assert [each.kernel for each in found] == [f"product {scheme}" for scheme in TYPES]
    assert all(each.error <= 1 for each in found), found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_that_loses_an_input_is_above_its_bound(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = PackedMatrix.multiply

    def losing(self: PackedMatrix, x: Any) -> Any:
        return multiply(self, mx.concatenate([x[:, :-8], mx.zeros_like(x[:, :8])], axis=1))

    monkeypatch.setattr(PackedMatrix, "multiply", losing)
    found = MlxBackend(BackendOptions(device="cpu", dtype=dtype)).kernel_errors()
    assert all(each.error > 1 for each in found)
