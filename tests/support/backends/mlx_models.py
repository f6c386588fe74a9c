"""Tiny random models in memory, and the few lines that drive one backend through a chain of slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from edgepipe_mlx import MlxBackend

from edgepipe.backend.types import ActivationType, BackendOptions, BlockCopy, BlockRun, Step, StepRow
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.kv_forms import rest_tokens
from edgepipe.spec.layout import model_tensors
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightSource
from edgepipe.testing import tiny_model
from edgepipe.weights.stored_weight import OneTensorPerWeight
from tests.support.backends.roomy import RoomyBackend

Float32s = npt.NDArray[np.float32]
BLOCK_SIZE = 16


def tiny_config(**changes: Any) -> ModelConfig:
    """Three Llama layers with grouped queries and a head size that is not hidden / heads."""
    facts: dict[str, Any] = {"num_layers": 3, "intermediate_size": 48, "head_dim": 12}
    return tiny_model.tiny_config(**facts | changes)


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Float32s]:
    """Weights large enough for attention and activations to matter; norms around one."""
    random = np.random.default_rng(seed)
    return {
        name: (random.standard_normal(shape) * 0.3 + ("norm" in name)).astype(np.float32)
        for name, shape in model_tensors(config).items()
    }


@dataclass(slots=True)
class MemorySource(OneTensorPerWeight):
    """A WeightSource over arrays; counts what is read."""

    config: ModelConfig
    arrays: dict[str, Float32s]
    names_read: list[str] = field(default_factory=list[str])
    bytes_read: int = 0

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        head = {"model.norm.weight", "model.embed_tokens.weight" if self.config.tied_embeddings else "lm_head.weight"}

        def wanted(name: str) -> bool:
            if name.startswith("model.layers."):
                return int(name.split(".")[2]) in part.layers
            return (part.embedding and name == "model.embed_tokens.weight") or (part.head and name in head)

        return [
            TensorInfo(name=name, shape=array.shape, scheme="F32", num_bytes=array.nbytes)
            for name, array in self.arrays.items()
            if wanted(name)
        ]

    def read(self, name: str) -> StoredTensor:
        array = self.arrays[name]
        self.names_read.append(name)
        self.bytes_read += array.nbytes
        info = TensorInfo(name=name, shape=array.shape, scheme="F32", num_bytes=array.nbytes)
        return StoredTensor(info=info, data=array.reshape(-1).view(np.uint8))


def cpu_options(
    *,
    dtype: str = "float32",
    activation_type: ActivationType = ActivationType.FLOAT32,
    weights: str = "auto",
    kv: str = "",
    sampling: str = "auto",
) -> BackendOptions:
    """The CPU device, so that figures and rounding are the same on every machine."""
    settings = {"weights": weights, "sampling": sampling}
    return BackendOptions(device="cpu", dtype=dtype, kv=kv, activation_type=activation_type, settings=settings)


class Chain:
    """One backend that holds all slices and runs each step through them, as a pipeline would."""

    def __init__(
        self,
        source: WeightSource,
        *,
        ranges: Sequence[tuple[int, int]] | None = None,
        options: BackendOptions | None = None,
        num_blocks: int = 32,
    ) -> None:
        config = source.config
        parts = [LayerRange(*pair) for pair in ranges or [(0, config.num_layers)]]
        self.slices = make_slices(parts, config.num_layers)
        options = options or cpu_options()
        self.plain = MlxBackend(options)
        self.backend = cast("MlxBackend", RoomyBackend(self.plain)) if rest_tokens(options.kv) else self.plain
        self.backend.load(self.slices, source, lambda _: None)
        self.backend.allocate_kv(num_blocks=num_blocks, block_size=BLOCK_SIZE)

    def run(
        self,
        tokens: Sequence[int],
        rows: Sequence[StepRow],
        *,
        logit_rows: Sequence[int] | None = None,
        copies: tuple[BlockCopy, ...] = (),
    ) -> Float32s:
        """One step through all slices; logits of ``logit_rows``, all rows if None."""
        wanted = range(len(tokens)) if logit_rows is None else logit_rows
        data: npt.NDArray[np.generic] = np.array(tokens, np.int32)
        for part in self.slices:
            step = Step(
                step=StepId(1),
                slice_index=part.index,
                rows=tuple(rows),
                logit_rows=np.array(list(wanted), np.int32),
                copies=copies if part.index == 0 else (),
            )
            output = self.backend.collect(self.backend.submit(self.backend.prepare(step), data))  # type: ignore[arg-type]
            data = output.logits if output.activations is None else output.activations  # type: ignore[assignment]
        return data  # type: ignore[return-value]


def row(position: int, num_tokens: int, *runs: tuple[int, int], sequence: int = 1) -> StepRow:
    """A StepRow from plain numbers; each run is (first block, count)."""
    return StepRow(
        sequence=SequenceId(sequence),
        position=position,
        num_tokens=num_tokens,
        runs=tuple(BlockRun(*run) for run in runs),
    )
