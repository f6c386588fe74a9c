"""What the contract suite cannot see: memory while loading, work per step, choices of device."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu.linear import half_works  # noqa: E402
from edgepipe_torch.cpu.transfer import HostTransfer  # noqa: E402
from edgepipe_torch.cuda.device import CudaDevice  # noqa: E402
from edgepipe_torch.layers.attention import CausalMasks  # noqa: E402
from edgepipe_torch.layers.decoder import SliceWeights  # noqa: E402
from edgepipe_torch.layers.kv import KVStorage  # noqa: E402
from edgepipe_torch.layers.linear import Linear, PlainLinear  # noqa: E402
from edgepipe_torch.layers.mixers import SelfAttention  # noqa: E402
from edgepipe_torch.layers.slice_builder import SliceBuilder  # noqa: E402

from edgepipe.backend.types import BackendOptions, LoadProgress  # noqa: E402
from edgepipe.errors import BackendUnavailable, ConfigInvalid, DeviceOutOfMemory, ModelInvalid  # noqa: E402
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices  # noqa: E402
from edgepipe.spec.layout import slice_parameters  # noqa: E402
from edgepipe.spec.tensors import StoredTensor, TensorInfo  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row, token_ids  # noqa: E402
from tests.support.backends.torch_slices import loaded_slice  # noqa: E402

CPU = torch.device("cpu")


def ignore(_progress: LoadProgress) -> None:
    pass


def whole(config: ModelConfig) -> tuple[Slice, ...]:
    return make_slices([LayerRange(0, config.num_layers)], config.num_layers)


def loaded(config: ModelConfig, **options: Any) -> TorchBackend:
    backend = TorchBackend(BackendOptions(**({"device": "cpu", "threads": 1} | options)))
    backend.load(whole(config), TinyWeights(config), ignore)
    backend.allocate_kv(num_blocks=8, block_size=16)
    return backend


class OneAtATime(TinyWeights):
    """Weights that insist that a tensor is dropped before the next is read."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.given: list[weakref.ref[np.ndarray]] = []

    def read(self, name: str) -> StoredTensor:
        assert all(given() is None for given in self.given), f"{name} is read while another tensor is held"
        raw = super().read(name)
        self.given.append(weakref.ref(raw.data))
        return raw


class WideWeights(TinyWeights):
    """The same stored in float32, which fp16 is not trusted to hold."""

    def tensors(self, part: Slice) -> list[TensorInfo]:
        return [replace(info, scheme="F32", num_bytes=2 * info.num_bytes) for info in super().tensors(part)]

    def read(self, name: str) -> StoredTensor:
        values = self.values(name)
        info = TensorInfo(name=name, shape=values.shape, scheme="F32", num_bytes=values.nbytes)
        return StoredTensor(info=info, data=values.reshape(-1).view(np.uint8))


class TestLoading:
    def test_raw_tensors_are_dropped_before_the_next_is_read(self) -> None:
        weights = OneAtATime(tiny_config(qkv_bias=True, qk_norm=True))
        TorchBackend(BackendOptions(device="cpu", threads=1)).load(whole(weights.config), weights, ignore)
        assert len(weights.given) == len(weights.tensors(whole(weights.config)[0]))

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize(
        ("dtype", "stored", "num_bytes"),
        [(torch.bfloat16, "BF16", 2), (torch.float32, "F32", 4), (torch.float32, "BF16", 2 if half_works() else 4)],
        ids=["bf16", "float32", "float32 of bf16 weights"],
    )
    def test_weights_are_held_once(self, dtype: Any, stored: str, num_bytes: int, tied: bool) -> None:
        """No copy from before merging or packing stays. In fp16 a tied head cannot embed, so the table comes twice."""
        config = tiny_config(tied_embeddings=tied, qkv_bias=True, vocab_size=96, num_layers=40)
        source = WideWeights(config) if stored == "F32" else TinyWeights(config)
        slices = (*make_slices([LayerRange(0, 1), LayerRange(1, 39), LayerRange(39, 40)], 40), *whole(config))
        for part in slices:
            weights = loaded_slice(source, part, dtype=dtype)
            vectors = len(part.layers) * (2 * 32 + 64) + 32 * part.head  # norms and biases stay in the compute dtype
            matrices = slice_parameters(config, part) - vectors
            twice = tied and part.embedding and part.head and dtype == torch.float32 and num_bytes == 2
            table = 96 * 32 if twice else 0
            assert held_bytes(weights) == num_bytes * (matrices + table) + dtype.itemsize * vectors

    def test_a_tensor_of_another_shape_is_refused(self) -> None:
        class Wrong(TinyWeights):
            def read(self, name: str) -> StoredTensor:
                raw = super().read(name)
                if "up_proj" not in name:
                    return raw
                info = TensorInfo(name=name, shape=raw.info.shape[::-1], scheme="BF16", num_bytes=raw.info.num_bytes)
                return StoredTensor(info=info, data=raw.data)

        config = tiny_config()
        with pytest.raises(ModelInvalid, match="up_proj"):
            TorchBackend(BackendOptions(device="cpu", threads=1)).load(whole(config), Wrong(config), ignore)

    def test_a_failed_load_keeps_no_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next try needs their memory, and Python's next collection may be far."""

        class Broken(TinyWeights):
            def read(self, name: str) -> StoredTensor:
                if "layers.1" in name:
                    raise ModelInvalid("a file is damaged")
                return super().read(name)

        made: list[weakref.ref[Any]] = []
        build = SliceBuilder.__init__

        def note(builder: SliceBuilder, *given: Any, **named: Any) -> None:
            build(builder, *given, **named)
            made.append(weakref.ref(builder.weights.layers[0].linears[0]))

        monkeypatch.setattr(SliceBuilder, "__init__", note)
        backend, config = TorchBackend(BackendOptions(device="cpu", threads=1)), tiny_config()
        gc.disable()
        try:
            with suppress(ModelInvalid):
                backend.load(whole(config), Broken(config), ignore)
            assert [each() for each in made] == [None]
        finally:
            gc.enable()

    @pytest.mark.parametrize(
        ("raised", "expected"),
        [
            (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), DeviceOutOfMemory),
            (
                RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
                DeviceOutOfMemory,
            ),
            (RuntimeError("CUDA error: out of memory"), DeviceOutOfMemory),
            (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
            (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), ModelInvalid),
        ],
        ids=["GPU", "CPU", "driver", "fault", "shape"],
    )
    def test_an_error_while_a_tensor_is_placed(
        self, raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only a wrong shape is the model's fault."""

        def fill(*_given: Any) -> None:
            raise raised

        monkeypatch.setattr(PlainLinear, "fill", fill)
        backend, config = TorchBackend(BackendOptions(device="cpu", dtype="bfloat16", threads=1)), tiny_config()
        with pytest.raises(expected) as caught:
            backend.load(whole(config), TinyWeights(config), ignore)
        assert caught.type is expected


def held_bytes(weights: SliceWeights) -> int:
    """Memory of all tensors of a slice, each counted once."""
    held: dict[int, int] = {}

    def add(item: object) -> None:
        if item is not None:
            held[id(item)] = getattr(item, "num_bytes", 0) or getattr(item, "nbytes", 0)

    for name in ("embedding", "final_norm", "head"):
        add(getattr(weights, name))
    for layer in weights.layers:
        assert isinstance(layer.mixer, SelfAttention)
        for owner in (layer, layer.mixer):
            for name in owner.__slots__:
                value = getattr(owner, name)
                add(None if isinstance(value, int) else value)
    return sum(held.values())


class CountingLinear:
    """Passes everything on and counts the rows that are multiplied."""

    def __init__(self, linear: Linear, counts: list[int]) -> None:
        self._linear = linear
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._linear, name)

        def counted(x: Any, *rest: Any) -> Any:
            self._counts.append(x.shape[0])
            return method(x, *rest)

        return counted


class TestWork:
    def test_a_step_multiplies_its_new_tokens_only(self) -> None:
        """Decoding costs the same at every length: what came before is read from the KV, never computed again."""
        backend = loaded(tiny_config())
        counts = count_rows(backend)
        for position, count in ((0, 30), (30, 1), (31, 1), (32, 5), (37, 60), (97, 1)):
            counts.clear()
            step = make_step([step_row(position, count, (0, 8))])
            run_step(backend, step, token_ids(range(count)))
            assert set(counts) == {count}
            assert len(counts) == 4 * 4  # qkv, output, gate and up, down of four layers

    def test_behind_the_last_attention_only_wanted_rows_go_on(self) -> None:
        backend = loaded(tiny_config())
        counts = count_rows(backend)
        run_step(backend, make_step([step_row(0, 30, (0, 8))], logit_rows=[29, 3]), token_ids(range(30)))
        assert counts == [30] * 13 + [2] * 3

    def test_nothing_is_allocated_for_kv_after_the_pool(self) -> None:
        backend = loaded(tiny_config())
        address = pool_address(backend)
        for position in range(40):
            run_step(backend, make_step([step_row(position, 1, (0, 8))]), token_ids([position]))
        assert pool_address(backend) == address


def pool_address(backend: TorchBackend) -> int:
    storage = backend._pools[0]
    assert isinstance(storage, KVStorage)
    return storage.pools[0].data_ptr()


def count_rows(backend: TorchBackend) -> list[int]:
    counts: list[int] = []
    for layer in backend._weights[0].layers:
        for owner, name in (
            (layer.mixer, "qkv"),
            (layer.mixer, "output"),
            (layer.feed_forward, "gate_up"),
            (layer.feed_forward, "down"),
        ):
            setattr(owner, name, CountingLinear(getattr(owner, name), counts))
    return counts


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_masks(window: int | None) -> None:
    masks = CausalMasks(torch.float32, CPU)
    for num_rows, num_keys in ((1, 1), (4, 4), (3, 10), (64, 64), (64, 200), (2, 1000)):
        found = masks.get(num_rows, num_keys, window) == 0
        own = torch.arange(num_rows)[:, None] + num_keys - num_rows
        key = torch.arange(num_keys)[None, :]
        seen = (key <= own) & (key > own - (window or num_keys + 1))
        assert torch.equal(found, seen)


class TestDevices:
    @pytest.mark.parametrize("device", ["tpu", "cpu:1", "cuda:x", "CUDA"])
    def test_unknown_devices_are_refused(self, device: str) -> None:
        with pytest.raises(ConfigInvalid):
            TorchBackend(BackendOptions(device=device))

    def test_unknown_dtypes_are_refused(self) -> None:
        with pytest.raises(ConfigInvalid):
            TorchBackend(BackendOptions(device="cpu", dtype="float8"))

    def test_a_missing_gpu_is_named(self) -> None:
        with pytest.raises(BackendUnavailable, match="cuda:77"):
            TorchBackend(BackendOptions(device="cuda:77"))

    def test_memory_in_torchs_cache_is_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CUDA counts it as used. Loading and measuring leave gigabytes there, which the KV pool can have."""
        cached = [2 << 30]
        monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: ((5 << 30) - sum(cached), 24 << 30))
        device = CudaDevice(torch.device("cpu"), torch.float32, transfer=HostTransfer())
        assert device.free_bytes() == 5 << 30
