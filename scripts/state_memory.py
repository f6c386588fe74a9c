"""What stages allocate for sequences of models with recurrent layers, against what the planner says.

The models have every layer of the published ones, with small matrices: neither the hidden size nor the feed-forward
part changes what a sequence keeps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import torch
from edgepipe_emulated import EmulatedBackend
from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend
from figures import Row

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import BackendOptions
from edgepipe.model.config import hf_config
from edgepipe.model.facts import LayerRange, ModelConfig, Slice
from edgepipe.model.layer_spec import Dense, LayerSpec
from edgepipe.model.memory_classes import kv_bytes, state_slots
from edgepipe.shapes.loader import named_shape
from edgepipe.stage.made_up import MadeUpWeights
from tests.support.recurrent_checkpoints import LFM2, made

NAMED = ("qwen3.6-35b-a3b", "qwen3.5-9b", "qwen3-coder-next", "nemotron-3-nano", "granite-4.0-h-tiny")
SEQUENCES = 8
TOKENS = 1024  # of a sequence
_BLOCK = 16
_SMALL = 64
_NEAR = 0.05
_OPTIONS = BackendOptions(device="cpu", dtype="float32", threads=1)
_EMULATED = BackendOptions(settings={"time_factor": "0", "memory": "1TB"})


def memory_rows(_full: bool) -> list[Row]:
    """Compare the bytes of a sequence, and of a stage's whole pools, with the planner's: the backend farthest off."""
    models = {name: named_shape(name) for name in NAMED}
    models["a tiny LFM2"] = hf_config(made("Lfm2Config", LFM2, intermediate_size=48)().to_dict())
    return [row for name, config in models.items() for row in _rows_of(name, small(config))]


def small(config: ModelConfig) -> ModelConfig:
    """Return the model with small matrices and the same KV and states."""
    layers = tuple(_small_feed(spec) for spec in config.layers)
    return replace(config, layers=layers, hidden_size=_SMALL, vocab_size=_SMALL)


def _small_feed(spec: LayerSpec) -> LayerSpec:
    return replace(spec, dense=Dense(inner=_SMALL), experts=None) if spec.feeds else spec


def _rows_of(name: str, config: ModelConfig) -> list[Row]:
    one: dict[str, tuple[int, int]] = {}  # bytes allocated and planned, by backend
    whole: dict[str, tuple[int, int]] = {}
    tokens, slots = SEQUENCES * TOKENS, state_slots(config, SEQUENCES * TOKENS)
    for kind, (make, held_bytes, form) in BACKENDS.items():
        backend = make()
        part = Slice(index=1, layers=LayerRange(0, config.num_layers), embedding=False, head=False)
        backend.load([part], MadeUpWeights(config), lambda _progress: None)
        loaded_bytes = held_bytes(backend)
        sizes: list[int] = []
        for more in (0, 1):
            blocks = (tokens + more * TOKENS) // _BLOCK
            backend.allocate_kv(num_blocks=blocks, block_size=_BLOCK, state_slots=slots + more)
            sizes.append(held_bytes(backend) - loaded_bytes)
        backend.close()
        kept = config.state_bytes() + TOKENS * config.kv_bytes_per_token(form=form)
        one[kind] = sizes[1] - sizes[0], kept
        whole[kind] = sizes[0], sum(kv_bytes(config, tokens, form=form))
    pools = f"  of pools with {slots} slots and {tokens} tokens"
    return [_row(f"memory of a sequence of {name}, {TOKENS} tokens", one), _row(pools, whole)]


def _row(name: str, found: dict[str, tuple[int, int]]) -> Row:
    """Return the row of the backend that is farthest from the plan."""
    kind, (allocated, planned) = max(found.items(), key=lambda each: abs(each[1][0] / each[1][1] - 1))
    ratio = allocated / planned
    met = abs(ratio - 1) <= _NEAR
    target = f"within {_NEAR:.0%}"
    return Row(f"{name}: {kind}", allocated / 1e6, "MB", planned / 1e6, "as plan says", ratio, target, met)


def _torch_bytes(_backend: Backend) -> int:
    """Return the bytes of all tensors that live in this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _mlx_bytes(_backend: Backend) -> int:
    gc.collect()
    return mx.get_active_memory()


def _emulated_bytes(backend: Backend) -> int:
    return -backend.profile().memory_free_bytes


BACKENDS: dict[str, tuple[Callable[[], Backend], Callable[[Backend], int], str]] = {
    "torch": (lambda: TorchBackend(_OPTIONS), _torch_bytes, "float32"),
    "MLX": (lambda: MlxBackend(_OPTIONS), _mlx_bytes, "float32"),
    "emulated": (lambda: EmulatedBackend(_EMULATED), _emulated_bytes, "bfloat16"),
}
"""How to make a backend, what it holds, and the form of its KV."""
