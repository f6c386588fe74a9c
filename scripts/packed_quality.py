"""KL divergence of packed computing against exact weights, over the text that the package holds.

The reference computes in float32 with the file's exact values. Beside each figure stands that of bf16 arithmetic with
the same exact weights: packed computing may lose a little more than that, as the target says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend
from figures import Row

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import BackendOptions
from edgepipe.model.dequantise import as_float32
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.logical import OneTensorPerWeight
from edgepipe.model.packed import Packed
from edgepipe.model.quantise import REFERENCE_TEXT
from edgepipe.model.tensors import RawTensor, TensorInfo, WeightSource
from edgepipe.model.tokenizer import Tokenizer
from edgepipe.model.weights import open_weights
from tests.support import ggml
from tests.support.numerics_harness import Pipeline

TOKENS, MLX_TOKENS, WINDOW = 4096, 256, 256
ALLOWED = 5e-4  # mean KL above that of bf16 arithmetic
KV_ALLOWED = 2e-3  # mean KL of 8-bit KV

Floats = npt.NDArray[np.float32]


class Quality(NamedTuple):
    """Result of one computation against the reference."""

    kl: float  # mean over positions, nats
    agrees: float  # share of positions with the same most likely token


class ExactWeights(OneTensorPerWeight):
    """A source's weights with their exact values in float32."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.bytes_read = 0

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._source.config

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        """Every weight of the slice in F32."""
        return [_exact(info.name, info.shape) for info in self._source.weights(part)]

    def read(self, name: str) -> RawTensor:
        """One weight, widened."""
        found = self._source.load(name)
        values = found.float32() if isinstance(found, Packed) else as_float32(found)
        return RawTensor(info=_exact(name, values.shape), data=np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def _exact(name: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name=name, shape=shape, scheme="F32", num_bytes=4 * int(np.prod(shape)))


def quality_rows(model: Path, schemes: Sequence[str]) -> list[Row]:
    """Rows of the model as it is, and of its copies in other types."""
    rows = _rows_of(model, "as downloaded")
    with tempfile.TemporaryDirectory() as folder:
        for scheme in schemes:
            copy = ggml.requantised_gguf(model / "model.gguf", Path(folder) / f"{scheme}.gguf", scheme)
            rows += _rows_of(copy, scheme, tokens_of=model)
            copy.unlink()
    return rows


def _rows_of(path: Path, name: str, *, tokens_of: Path | None = None) -> list[Row]:
    tokens = _tokens(tokens_of or path)
    exact = ExactWeights(open_weights(path))
    reference = _logits([_torch("float32")], exact, tokens)
    rows: list[Row] = []

    floor = compare(reference[:MLX_TOKENS], _logits([_torch("bfloat16")], exact, tokens[:MLX_TOKENS])).kl

    def add(label: str, backends: Sequence[Callable[[], Backend]], count: int) -> None:
        found = compare(reference[:count], _logits(backends, open_weights(path), tokens[:count]))
        met = found.kl <= floor + ALLOWED
        note = f"<= bf16 + {ALLOWED:.0e}; same token {found.agrees:.1%}"
        ratio = found.kl / floor
        rows.append(
            Row(
                f"KL, {name}, {label}",
                found.kl,
                "nats",
                floor,
                f"bf16 arithmetic, {MLX_TOKENS} tokens",
                ratio,
                note,
                met,
            )
        )

    add("torch CPU", [_torch("auto")], TOKENS)
    add("MLX", [_mlx("auto")], MLX_TOKENS)
    add("torch CPU, then MLX", [_torch("auto"), _mlx("auto")], MLX_TOKENS)
    return rows


def kv_rows(model: Path) -> list[Row]:
    """Rows of 8-bit KV, each against the same backend with KV in its compute type."""
    tokens, source = _tokens(model), open_weights(model)
    rows: list[Row] = []
    for label, make, count in (("torch CPU", _torch, TOKENS), ("MLX", _mlx, MLX_TOKENS)):
        reference = _logits([make("auto")], source, tokens[:count])
        found = compare(reference, _logits([make("auto", kv="8bit")], source, tokens[:count]))
        note = f"same token {found.agrees:.1%}"
        ratio = found.kl / KV_ALLOWED
        rows.append(Row(f"KL, kv 8bit, {label}", found.kl, "nats", KV_ALLOWED, "bound", ratio, note, ratio <= 1))
    return rows


def _tokens(model: Path) -> list[int]:
    return Tokenizer.from_file(model / "tokenizer.json").encode(REFERENCE_TEXT)[:TOKENS]


def compare(reference: Floats, found: Floats) -> Quality:
    """Mean KL divergence and agreement of logits [T, V]."""
    divergences: list[float] = []
    for expected, computed in zip(reference, found, strict=True):
        log_p, log_q = _log_softmax(expected), _log_softmax(computed)
        divergences.append(float((np.exp(log_p) * (log_p - log_q)).sum()))
    same = (reference.argmax(-1) == found.argmax(-1)).mean()
    return Quality(float(np.mean(divergences)), float(same))


def _log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())


def _logits(backends: Sequence[Callable[[], Backend]], source: WeightSource, tokens: Sequence[int]) -> Floats:
    """Return logits [T, V]; each window of the text is a sequence of its own."""
    pipeline = Pipeline.build([make() for make in backends], source, num_blocks=WINDOW // 16 + 1)
    found: list[Floats] = []
    for start in range(0, len(tokens), WINDOW):
        window = tokens[start : start + WINDOW]
        sequence = pipeline.add(len(window))
        found.append(pipeline.step([(sequence, window)], all_logits=True))
        pipeline.drop(sequence)
    pipeline.close()
    return np.concatenate(found)


def _torch(dtype: str, kv: str = "auto") -> Callable[[], Backend]:
    return lambda: TorchBackend(BackendOptions(device="cpu", dtype=dtype, threads=2, settings={"kv": kv}))


def _mlx(dtype: str, kv: str = "auto") -> Callable[[], Backend]:
    return lambda: MlxBackend(BackendOptions(device="cpu", dtype=dtype, settings={"kv": kv}))
