"""Where the time of a decode step with packed weights goes, and which arrays a stage holds, on a CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import torch
from bench_backend import NEW_TOKENS, Ours
from edgepipe_torch import TorchBackend
from edgepipe_torch.cpu_kernels import CpuKernels, cpu_kernels
from edgepipe_torch.linear import Linear, Workspace
from edgepipe_torch.loading import load_slices
from edgepipe_torch.rope import Rotations
from figures import Row, below

from edgepipe.backend.types import BackendOptions
from edgepipe.model.facts import LayerRange, make_slices
from edgepipe.model.resident import resident_bytes
from edgepipe.model.tensors import WeightSource
from edgepipe.model.weights import open_weights
from tests.support.specs import first_attention, first_dense

ROUNDS = 5
SEQUENCES = (1, 16)


def split_rows(model: Path) -> list[Row]:
    """Milliseconds of a decode step on one thread: products of the layers, the head's, and all else; least of several.

    The products are the step's own calls, without anything between them.
    """
    weights = open_weights(model)
    whole = Ours(weights, device="cpu", threads=1)
    rows: list[Row] = []
    for count in SEQUENCES:
        step, (layers, head) = whole.decode(count), _products(weights, count)
        taken = [(step() / NEW_TOKENS, layers(), head()) for _ in range(ROUNDS + 1)][1:]
        step_s, layers_s, head_s = np.min(taken, axis=0)
        name = f"decode step, {count} sequence{'s' * (count > 1)}, 1 thread"
        parts = {"products of the layers": layers_s, "the head": head_s, "all else": step_s - layers_s - head_s}
        rows.append(Row(name, 1e3 * step_s, "ms"))
        rows += [
            Row(f"  {part}", 1e3 * part_s, "ms", 1e3 * step_s, "the step", part_s / step_s)
            for part, part_s in parts.items()
        ]
    return rows


def _products(weights: WeightSource, rows: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return functions that compute the layers' products and the head's, and return their seconds."""
    config = weights.config
    attention, dense = first_attention(config), first_dense(config)
    slices = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    device = torch.device("cpu")
    (part,) = load_slices(
        slices,
        weights,
        lambda _: None,
        dtype=torch.float32,
        device=device,
        workspace=Workspace(torch.float32, device),
        rotations=Rotations(config).kinds,
    )
    assert part.head is not None
    hidden, heads, inner = (
        torch.randn(rows, size) for size in (config.hidden_size, attention.query_width, dense.inner)
    )
    inputs = (hidden, heads, hidden, inner)
    layers = [
        product
        for layer in part.layers
        for product in zip((layer.qkv, layer.output, *layer.feed_forward.products), inputs, strict=True)
    ]
    return _timed(layers), _timed([(part.head, hidden)])


def _timed(products: Sequence[tuple[Linear, torch.Tensor]]) -> Callable[[], float]:
    """Record the products where kernels compute them, as a decode step does."""
    kernels = cpu_kernels()

    def multiply() -> None:
        for linear, x in products:
            linear.rows(x)

    work = multiply
    if isinstance(kernels, CpuKernels):
        with kernels.record() as recording:
            multiply()
        recording.owned.append(products)  # it has the addresses of their weights
        work = lambda: kernels.replay(recording)  # noqa: E731

    def run() -> float:
        begun_s = time.perf_counter()
        work()
        return time.perf_counter() - begun_s

    return run


def resident_rows(model: Path) -> list[Row]:
    """Count every array that a loaded backend holds, beside its packed weights and one layer in 16 bits."""
    source = open_weights(model)
    config = source.config
    backend = TorchBackend(BackendOptions(device="cpu", threads=2))
    slices = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    backend.load(slices, source, lambda _progress: None)
    infos = source.weights(slices[0])
    packed = [info for info in infos if info.form is not None]
    expected = sum(resident_bytes(info.form, info.shape, kind="torch-cpu", dtype="float32") for info in packed)
    held = _array_bytes(backend)
    layer = sum(2 * int(np.prod(info.shape)) for info in packed if info.name.startswith("model.layers.0."))
    wide = sum(2 * int(np.prod(info.shape)) for info in packed)
    backend.close()
    return [
        Row("arrays of a stage, demo model", held / 1e6, "MB", wide / 1e6, "weights in 16 bits", held / wide),
        Row("  its weights as packed for kernels", expected / 1e6, "MB"),
        below("  beside those, against one layer in 16 bits", (held - expected) / 1e6, "MB", round(layer / 1e6, 2)),
    ]


def _array_bytes(root: object) -> int:
    """Return the bytes of all arrays that can be reached from an object, each buffer counted once."""
    seen: set[int] = set()
    buffers: dict[int, int] = {}
    todo = [root]
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, type | ModuleType | FunctionType):
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            buffers[storage.data_ptr()] = storage.nbytes()
        elif isinstance(found, np.ndarray):
            buffers[found.ctypes.data] = found.nbytes
        todo += gc.get_referents(found)
    return sum(buffers.values())
