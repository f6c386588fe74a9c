"""KL divergence of packed computing against exact weights, over the text that the package holds.

The reference computes in float32 with the file's exact values. Beside each figure stands that of bf16 arithmetic with
the same exact weights: packed computing may lose a little more than that, as the target says.

torch's own bf16 products take minutes on a CPU without bf16 instructions. So bf16 arithmetic here multiplies operands
rounded to bf16 in float32 and rounds the result to bf16; all other operations are torch's in bf16. A row compares such
products with torch's own. MLX computes in a process of its own meanwhile.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend
from edgepipe_torch.layers.linear import PlainLinear, Workspace
from figures import Row
from gguf import GGUFReader

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import BackendOptions, LoadProgress
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.kv_forms import REST_TOKENS
from edgepipe.spec.layout import layer_tensors
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightSource
from edgepipe.store.quantise import REFERENCE_TEXT
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.stored_weight import OneTensorPerWeight
from edgepipe.weights.weights import open_weights
from tests.support.models import ggml
from tests.support.numerics.harness import Pipeline

TOKENS, MLX_TOKENS = 4096, 256
WINDOW = 256
_AT_ONCE = 512  # tokens of a step
_COMPARED = 64  # rows compared at once
ALLOWED = 5e-4  # mean KL above that of bf16 arithmetic
CHECKED_ROWS, EQUAL = 64, 0.999  # results of bf16 products that are those of torch; sums in another order differ
# Mean KL of 8-bit KV. Measured: 9.4e-4 (torch, 4,096 tokens), 1.1e-3 (MLX, 256). KL grows with the power of the
# rounding noise: codes of 7 bits would have 4 times as much, and of half of the heads 2.5 times. KV of 4 bits: 5.1e-2
# (torch, 1,024 tokens).
KV_ALLOWED = {"8bit": 1.5e-3, "4bit": 8e-2}
# Mean KL of products whose inputs are rounded to integers, and of how many tokens.
PRODUCTS_ALLOWED, PRODUCTS_TOKENS = {"int16": 1e-5, "int8": 5e-2}, 512

Floats = npt.NDArray[np.float32]
MakeBackend = Callable[[], Backend]


class Divergence(NamedTuple):
    """Result of one computation against the reference, by position."""

    kl: npt.NDArray[np.float64]  # [T], nats
    same: npt.NDArray[np.bool_]  # [T], whether the most likely token is the same

    def first(self, count: int) -> Divergence:
        """Return the result of the first positions."""
        return Divergence(self.kl[:count], self.same[:count])


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

    def read(self, name: str) -> StoredTensor:
        """One weight, widened."""
        found = self._source.load(name)
        values = found.float32() if isinstance(found, Packed) else as_float32(found)
        return StoredTensor(
            info=_exact(name, values.shape), data=np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        )


def _exact(name: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name=name, shape=shape, scheme="F32", num_bytes=4 * int(np.prod(shape)))


class FloatProducts(PlainLinear):
    """Products of operands in the compute dtype with sums in float32, rounded to the compute dtype.

    In float32 they are faster for long prompts than the backend's own, which are laid out for decoding.
    """

    def __init__(self, in_features: int, parts: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(in_features, parts, dtype=dtype, device=device)
        self._wide = self._weight

    def finish(self) -> None:
        """Widen the weight once."""
        self._wide = self._weight.float()

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self._product(x).to(x.dtype)

    def add_to(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """See ``Linear``. The sum is rounded once."""
        total.copy_(self._product(x) + total.float())

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        gate, up = self.rows(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self._wide, None if self._bias is None else self._bias.float())


class Float32Products(FloatProducts):
    """The same with the arguments of ``TiledLinear``."""

    def __init__(self, name: str, in_features: int, parts: Sequence[int], workspace: Workspace) -> None:
        super().__init__(in_features, parts, dtype=torch.float32, device=torch.device("cpu"))


def quality_rows(model: Path, schemes: Sequence[str]) -> list[Row]:
    """Rows of the model as it is, and of its copies in other types."""
    tokens = _tokens(model)
    if ggml.ggml_library() is None:
        print("K-quantised copies are not measured: pip install xllamacpp")
        schemes = ()
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as beside,
    ):
        folder, stored = Path(name), model / "model.gguf"
        files = {"as downloaded": stored}
        for scheme in schemes:
            files[f"{scheme} copy"] = ggml.requantised_gguf(stored, folder / f"{scheme}.gguf", scheme)
        mlx = {
            (file, ring): beside.submit(
                _save_mlx_logits, path, tokens[:MLX_TOKENS], ring, folder / f"{file} {ring}.npy"
            )
            for file, path in files.items()
            for ring in (False, True)
        }
        rows = [_products_row(stored)]
        for file, path in files.items():
            rows += _rows_of(path, file, tokens, mlx[file, False], mlx[file, True])
    return rows


def _products_row(path: Path) -> Row:
    """Compare bf16 products as the floors have them with torch's own, over the matrices of the first layer."""
    source = open_weights(path)
    names = [name for name, shape in layer_tensors(source.config, 0).items() if len(shape) == 2]
    equal: list[float] = []
    for name in names:
        weight = torch.from_numpy(as_float32(ExactWeights(source).read(name))).bfloat16()
        outputs, inputs = weight.shape
        product = FloatProducts(inputs, [outputs], dtype=weight.dtype, device=weight.device)
        product.fill(0, weight)
        product.finish()
        x = torch.randn(CHECKED_ROWS, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
        equal.append(float((product.rows(x) == F.linear(x, weight)).float().mean()))
    share, name = float(np.mean(equal)), f"bf16 products of the floors, {CHECKED_ROWS} rows"
    return Row(name, 100 * share, "%", None, "equal to torch's own", None, f">= {EQUAL:.1%}", share >= EQUAL)


def _rows_of(path: Path, file: str, tokens: Sequence[int], mlx: Future[Path], ring: Future[Path]) -> list[Row]:
    source = open_weights(path)
    exact = ExactWeights(source)
    reference = list(logits_of([_exact_torch("float32")], exact, tokens))
    floor = compare(reference, logits_of([_exact_torch("bfloat16")], exact, tokens))
    found = {"torch CPU": compare(reference, logits_of([_torch("auto", threads=1)], source, tokens))}
    for label, stored in (("MLX in bf16", mlx), ("torch CPU, then MLX in bf16", ring)):
        found[label] = compare([reference[0][:MLX_TOKENS]], [np.load(stored.result())])
    kinds = _kinds(path)
    return [_row(f"KL, {file} ({kinds}), {label}", each, floor.first(len(each.kl))) for label, each in found.items()]


def _row(name: str, found: Divergence, floor: Divergence) -> Row:
    kl, least = float(found.kl.mean()), float(floor.kl.mean())
    note = f"<= bf16 + {ALLOWED:.0e}; same token {found.same.mean():.1%}"
    return Row(
        f"{name}, {len(found.kl)} tokens", kl, "nats", least, "bf16 arithmetic", kl / least, note, kl <= least + ALLOWED
    )


def _kinds(path: Path) -> str:
    """Return the number of matrices of each type: ``30 Q4_K, 180 Q5_0, 1 Q8_0``."""
    tensors = GGUFReader(path).tensors
    counts = Counter(tensor.tensor_type.name for tensor in tensors if len(tensor.shape) == 2)
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def kv_rows(model: Path) -> list[Row]:
    """Rows of KV as codes, each against the same backend with KV in its compute type."""
    tokens, source = _tokens(model), open_weights(model)
    rows: list[Row] = []
    for label, make, count in (("torch CPU", _torch, TOKENS), ("MLX", _mlx, MLX_TOKENS)):
        reference = list(logits_of([make("auto")], source, tokens[:count]))
        for form, allowed in KV_ALLOWED.items():
            found = compare(reference, logits_of([make("auto", kv=form)], source, tokens[:count]))
            note = f"same token {found.same.mean():.1%}"
            kl = float(found.kl.mean())
            rows.append(Row(f"KL, kv {form}, {label}", kl, "nats", allowed, "bound", kl / allowed, note, kl <= allowed))
    return rows


def products_rows(model: Path) -> list[Row]:
    """Rows of products whose inputs are rounded to integers, against those with inputs of float32."""
    tokens, source = _tokens(model)[:PRODUCTS_TOKENS], open_weights(model)
    reference = list(logits_of([_torch("auto", threads=1)], source, tokens))
    rows: list[Row] = []
    for products, allowed in PRODUCTS_ALLOWED.items():
        found = compare(reference, logits_of([_torch("auto", threads=1, products=products)], source, tokens))
        kl, note = float(found.kl.mean()), f"largest {found.kl.max():.1e}; same token {found.same.mean():.1%}"
        name = f"KL, products={products}, {len(tokens)} tokens"
        rows.append(Row(name, kl, "nats", allowed, "bound", kl / allowed, note, kl <= allowed))
    return rows


def _tokens(model: Path) -> list[int]:
    return Tokenizer.from_file(model / "tokenizer.json").encode(REFERENCE_TEXT)[:TOKENS]


def compare(reference: Iterable[Floats], found: Iterable[Floats]) -> Divergence:
    """Compare logits [T, V], in pieces of equal length: KL divergence in float64, and the most likely tokens."""
    divergences: list[npt.NDArray[np.float64]] = []
    same: list[npt.NDArray[np.bool_]] = []
    for expected, computed in zip(reference, found, strict=True):
        same.append(expected.argmax(-1) == computed.argmax(-1))
        for start in range(0, len(expected), _COMPARED):
            rows = slice(start, start + _COMPARED)
            log_p, log_q = (torch.from_numpy(each[rows]).double().log_softmax(-1) for each in (expected, computed))
            divergences.append(F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).numpy())
    return Divergence(np.concatenate(divergences), np.concatenate(same))


def logits_of(backends: Sequence[MakeBackend], source: WeightSource, tokens: Sequence[int]) -> Iterator[Floats]:
    """Yield logits [n, V] of the tokens; each window of the text is a sequence of its own."""
    blocks = _AT_ONCE // WINDOW * (-(-(WINDOW + REST_TOKENS) // 16))
    pipeline = Pipeline.build([make() for make in backends], source, num_blocks=blocks)
    for start in range(0, len(tokens), _AT_ONCE):
        starts = range(start, min(start + _AT_ONCE, len(tokens)), WINDOW)
        windows = [tokens[first : first + WINDOW] for first in starts]
        sequences = [pipeline.add(len(window)) for window in windows]
        yield pipeline.step(list(zip(sequences, windows, strict=True)), all_logits=True)
        for sequence in sequences:
            pipeline.drop(sequence)
    pipeline.close()


def _save_mlx_logits(model: Path, tokens: Sequence[int], ring: bool, path: Path) -> Path:
    """Save the logits [T, V] of MLX alone, or of torch and MLX with half of the layers each; return ``path``.

    MLX computes with the types of a Mac's GPU; its CPU device would compute in float32.
    """
    backends = [_torch("auto", threads=1), _mlx("bfloat16")] if ring else [_mlx("bfloat16")]
    np.save(path, np.concatenate(list(logits_of(backends, open_weights(model), tokens))))
    return path


def _torch(dtype: str, kv: str = "", threads: int = 2, products: str = "auto") -> MakeBackend:
    settings = {"products": products}
    return lambda: TorchBackend(BackendOptions(device="cpu", dtype=dtype, threads=threads, kv=kv, settings=settings))


def _exact_torch(dtype: str) -> MakeBackend:
    return lambda: _FloatProductsBackend(BackendOptions(device="cpu", dtype=dtype, threads=1))


class _FloatProductsBackend(TorchBackend):
    """The torch backend with ``FloatProducts`` of all weights."""

    def load(self, slices: Sequence[Slice], weights: WeightSource, progress: Callable[[LoadProgress], None]) -> None:
        """See ``Backend``."""
        device = "edgepipe_torch.cpu.device"
        with patch(f"{device}.PlainLinear", FloatProducts), patch(f"{device}.TiledLinear", Float32Products):
            super().load(slices, weights, progress)


def _mlx(dtype: str, kv: str = "") -> MakeBackend:
    return lambda: MlxBackend(BackendOptions(device="cpu", dtype=dtype, kv=kv))
