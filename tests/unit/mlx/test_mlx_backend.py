"""The MLX backend as a stage sees it: options, refusals, threads, and what its process imports."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from edgepipe_mlx import MlxBackend
from edgepipe_mlx.device import configure, unwired_memory

from edgepipe.backend.loader import create_backend
from edgepipe.backend.types import ActivationType, BackendOptions, Step
from edgepipe.errors import BackendUnavailable, ConfigInvalid, DeviceOutOfMemory, ShardMismatch
from edgepipe.ids import StepId
from edgepipe.spec.facts import LayerRange, make_slices
from tests.support.backends.mlx_models import Chain, MemorySource, cpu_options, random_weights, row, tiny_config

CONFIG = tiny_config()
SOURCE = MemorySource(CONFIG, random_weights(CONFIG))


def test_the_entry_point_makes_it() -> None:
    assert isinstance(create_backend("mlx", cpu_options()), MlxBackend)


@pytest.mark.parametrize("options", [BackendOptions(device="tpu"), BackendOptions(dtype="int4")])
def test_unknown_devices_and_types_are_refused(options: BackendOptions) -> None:
    with pytest.raises(ConfigInvalid):
        MlxBackend(options)


@pytest.mark.parametrize(
    ("on_gpu", "macos", "told"),
    [
        (True, "14.7.1", True),
        (True, "14", True),
        (True, "15.0", False),
        (True, "26.2", False),
        (True, "10.16", False),
        (True, "", False),
        (False, "14.7.1", False),
    ],
)
def test_a_mac_on_macos_14_says_what_it_lacks(on_gpu: bool, macos: str, told: bool) -> None:
    """10.16 is what programs for old systems see."""
    found = unwired_memory(on_gpu=on_gpu, macos=macos)
    assert (found is not None) == told
    if found is not None:
        assert found.reason == f"this is macOS {macos}, and MLX keeps memory for the GPU from macOS 15 on"
        assert found.remedy == "update macOS"


@pytest.mark.skipif(mx.is_available(mx.Device(mx.gpu)), reason="MLX has a GPU here")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(BackendUnavailable):
        MlxBackend(BackendOptions(device="gpu"))


def test_the_profile_is_measured() -> None:
    profile = MlxBackend(BackendOptions(device="cpu")).profile()
    assert (profile.backend, profile.device, profile.compute_dtype) == ("mlx", "cpu", "float32")
    assert 0 < profile.memory_free_bytes <= profile.memory_total_bytes
    assert profile.bandwidth_bytes_per_s > 0
    assert profile.flops > 0
    assert profile.block_sizes == (16, 256)
    assert profile.contiguous_kv
    assert mx.get_cache_memory() == 0, "a spare process would keep it"


@pytest.mark.parametrize(("recommended", "cached"), [(96 << 30, 1 << 30), (16 << 30, 512 << 20), (5 << 30, 256 << 20)])
def test_a_mac_keeps_models_wired_and_some_freed_memory(
    monkeypatch: pytest.MonkeyPatch, recommended: int, cached: int
) -> None:
    set_to: dict[str, int] = {}
    monkeypatch.setattr(mx, "set_default_device", lambda _device: None)
    monkeypatch.setattr(mx, "device_info", lambda _device: {"max_recommended_working_set_size": recommended})
    for name in ("set_wired_limit", "set_cache_limit"):
        monkeypatch.setattr(mx, name, lambda limit, name=name: set_to.update({name: limit}))
    configure(mx.Device(mx.gpu))
    assert set_to == {"set_wired_limit": recommended, "set_cache_limit": cached}


def one_token(slice_index: int = 0) -> Step:
    return Step(step=StepId(1), slice_index=slice_index, rows=(row(0, 1, (0, 1)),), logit_rows=np.zeros(1, np.int32))


@pytest.mark.parametrize(
    ("slice_index", "inputs"),
    [
        (0, np.zeros(2, np.int32)),
        (0, np.zeros(1, np.int64)),
        (0, np.full(1, CONFIG.vocab_size, np.int32)),
        (0, np.full(1, -1, np.int32)),
        (1, np.zeros((1, CONFIG.hidden_size), np.float32)),
        (1, np.zeros((1, CONFIG.hidden_size + 1), np.uint16)),
        (2, np.zeros(1, np.int32)),
    ],
    ids=["too many ids", "wrong ids", "outside the vocabulary", "negative", "float32", "wrong width", "not loaded"],
)
def test_inputs_that_do_not_fit_are_refused_and_the_backend_goes_on(slice_index: int, inputs: np.ndarray) -> None:
    chain = Chain(SOURCE, ranges=[(0, 1), (1, 3)], options=cpu_options(activation_type=ActivationType.BF16))
    with pytest.raises(ShardMismatch):
        chain.backend.submit(chain.backend.prepare(one_token(slice_index)), inputs)
    assert np.isfinite(chain.run([1], [row(0, 1, (0, 1))])).all()


def test_a_cache_that_cannot_fit_is_refused_before_it_is_taken() -> None:
    chain = Chain(SOURCE)
    with pytest.raises(DeviceOutOfMemory):
        chain.backend.allocate_kv(num_blocks=1 << 40, block_size=16)


def test_activations_travel_as_bf16_bits_in_memory_of_their_own() -> None:
    chain = Chain(SOURCE, ranges=[(0, 1), (1, 3)], options=cpu_options(activation_type=ActivationType.BF16))
    backend = chain.backend
    output = backend.collect(backend.submit(backend.prepare(one_token()), np.array([5], np.int32))).activations
    assert output is not None
    assert (output.dtype, output.shape) == (np.uint16, (1, CONFIG.hidden_size))
    assert output.flags["C_CONTIGUOUS"]
    assert output.flags["OWNDATA"]
    assert output.flags["WRITEABLE"]


def test_closing_gives_memory_back_and_may_be_repeated() -> None:
    before = mx.get_active_memory()
    chain = Chain(SOURCE, num_blocks=2000)
    assert mx.get_active_memory() > before + 1_000_000
    chain.backend.close()
    chain.backend.close()
    assert mx.get_active_memory() <= before + 100_000


def test_one_thread_computes_while_another_prepares() -> None:
    """Made here, loaded and run on a thread of its own, prepared here: as a stage does it."""
    backend = MlxBackend(cpu_options())
    slices = make_slices([LayerRange(0, 3)], 3)
    with ThreadPoolExecutor(1) as compute:
        compute.submit(backend.load, slices, SOURCE, lambda _: None).result()
        compute.submit(backend.allocate_kv, num_blocks=4, block_size=16).result()
        prepared = backend.prepare(one_token())
        ticket = compute.submit(backend.submit, prepared, np.array([5], np.int32)).result()
        logits = compute.submit(backend.collect, ticket).result().logits
        compute.submit(backend.close).result()
    expected = Chain(SOURCE).run([5], [row(0, 1, (0, 1))])
    assert logits is not None
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_step_starts_once_the_one_before_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it started before, its updates of the KV pools would copy them: the one before still reads them."""
    backend = Chain(SOURCE).backend
    started: list[object] = []
    start = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (started.append(arrays), start(*arrays)))
    first, second = (backend.submit(backend.prepare(one_token()), np.array([5], np.int32)) for _ in range(2))
    assert len(started) == 1
    earlier = backend.collect(first).logits
    assert len(started) == 2
    later = backend.collect(second).logits
    assert earlier is not None
    assert later is not None
    np.testing.assert_array_equal(earlier, later)
    backend.close()


STAGE_PROCESS = """
import sys
import psutil
from edgepipe.backend.loader import create_backend
from edgepipe.backend.types import BackendOptions
create_backend("mlx", BackendOptions(device="cpu")).profile()
from tests.support.backends.mlx_models import Chain, MemorySource, random_weights, row, tiny_config
config = tiny_config()
Chain(MemorySource(config, random_weights(config))).run([1, 2], [row(0, 2, (0, 1))])
heavy = {"torch", "transformers", "mlx_lm"} & set(sys.modules)
print(",".join(sorted(heavy)) or "none", psutil.Process().memory_info().rss)
"""


def test_a_stage_process_never_imports_torch_and_stays_small() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STAGE_PROCESS],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    heavy, rss_bytes = done.stdout.split()
    assert heavy == "none"
    assert int(rss_bytes) < 300e6
