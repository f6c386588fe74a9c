"""Launches per layer and decode step on CUDA, counted without a GPU (docs/architecture/backend-torch.md)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cuda.paging import AlsoReturn  # noqa: E402

from edgepipe.backend.types import BackendOptions, RowState, StateWrite, StepRow  # noqa: E402
from edgepipe.spec.facts import LayerRange, make_slices  # noqa: E402
from tests.support.backends.counted_launches import CountedKernels, CountedOperations, Launches  # noqa: E402
from tests.support.backends.steps import make_step, step_row, token_ids  # noqa: E402
from tests.support.backends.torch_paging import CudaOnHost, cpu_paging  # noqa: E402
from tests.support.models.counted_layers import LAYERS, counted_model  # noqa: E402

PAGE = 64
LAUNCHES = {
    ("Llama", "Q4_K"): 9,
    ("Llama", "Q4_K_M"): 10,
    ("Qwen3-30B-A3B", "Q4_K"): 14,
    ("Qwen3-30B-A3B", "Q4_K_M"): 15,
    ("Qwen3.6-35B-A3B", "Q4_K"): 16,
    ("Qwen3.6-35B-A3B", "Q4_K_M"): 17,
}
"""The documentation has the same numbers."""


@pytest.mark.parametrize(("layer", "file"), LAUNCHES, ids="-".join)
def test_launches_of_a_layer(layer: str, file: str) -> None:
    found = launches_of_a_layer(layer, file=file)
    assert found.total() == LAUNCHES[layer, file], found


@pytest.mark.parametrize("rows", [2, 8])
def test_more_rows_launch_no_more(rows: int) -> None:
    assert launches_of_a_layer("Llama", rows=rows).total() == LAUNCHES["Llama", "Q4_K"]


@pytest.mark.parametrize("kv", ["8bit", "4bit"])
@pytest.mark.parametrize("layer", ["Llama", "Qwen3-30B-A3B"])
def test_kv_as_codes_launches_no_more(layer: str, kv: str) -> None:
    found = launches_of_a_layer(layer, kv=kv)
    assert found["place_heads"] == 1
    assert found.total() == LAUNCHES[layer, "Q4_K"], found


def test_torchs_attention_is_one_call_and_a_copy() -> None:
    found = launches_of_a_layer("Llama", varlen=True)
    assert found["varlen_attn"] == 1
    assert found.total() == LAUNCHES["Llama", "Q4_K"]


def test_views_and_empty_tensors_launch_nothing() -> None:
    launches, x = Launches(), torch.zeros(4, 8)
    with torch.inference_mode(), CountedOperations(launches):
        view = x[1:].view(3, 2, 4).transpose(0, 1).unsqueeze(0)
        torch.empty_like(x)
        assert launches.total == 0
        view.mul_(2)
        x.copy_(x.clone())
        torch.nn.functional.rms_norm(x, (8,))
        x.float().double()
    assert launches.by_name == {"mul_": 1, "clone": 1, "copy_": 1, "rms_norm": 1, "to": 1}


def launches_of_a_step(layer: str, num_layers: int, *, file: str, rows: int, varlen: bool, kv: str) -> Counter[str]:
    """Count the first decode step of a size, which runs what the second one records."""
    launches = Launches()
    kernels = CountedKernels(launches)

    def attend(query: Any, *_given: Any, return_aux: AlsoReturn | None, **_named: Any) -> Any:
        assert return_aux is None
        return launches.whole("varlen_attn", torch.empty_like, query)

    decode = partial(kernels.decode, kv=kv)
    paging = cpu_paging(page_tokens=PAGE, decode=decode, attend=attend if varlen else None)
    device = CudaOnHost("bfloat16", paging=paging, step_kernels=kernels.mixer_step, kernels=kernels, kv=kv)
    backend = TorchBackend(BackendOptions(device="cpu", dtype="bfloat16", threads=1, kv=kv), device=device)
    backend.load(
        make_slices([LayerRange(0, num_layers)], num_layers),
        counted_model(layer, num_layers, file=file),
        lambda _progress: None,
    )
    states = rows if LAYERS[layer].recurrent is not None else 0
    backend.allocate_kv(num_blocks=rows, block_size=PAGE, state_slots=states)
    prepared = backend.prepare(make_step([_row(index, bool(states)) for index in range(rows)]))
    with CountedOperations(launches):
        backend.submit(prepared, token_ids([1] * rows))
    return launches.by_name


def _row(index: int, has_state: bool) -> StepRow:
    row = step_row(3, 1, (index, 1), sequence=index + 1)
    if not has_state:
        return row
    return replace(row, state=RowState(index, (StateWrite(1, index),)))


def launches_of_a_layer(
    layer: str, *, file: str = "Q4_K", rows: int = 1, varlen: bool = False, kv: str = ""
) -> Counter[str]:
    few, more = (launches_of_a_step(layer, count, file=file, rows=rows, varlen=varlen, kv=kv) for count in (1, 2))
    assert not few - more
    return more - few
