"""Compare the predictions of two models of one shape on a text: KL divergence, a few layers in memory at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.backend.loader import backend_names, create_backend
from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import DEFAULT_BLOCK_SIZE, ActivationType, BackendOptions, BlockRun, Step, StepRow
from edgepipe.errors import BackendUnavailable
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.kv_forms import REST_TOKENS
from edgepipe.spec.tensors import WeightSource

WINDOW_TOKENS = 256  # each window of the text is a sequence of its own
_SLICE_BYTES = 1 << 30  # stored weights that are loaded at once; one layer at least
_NOT_COMPUTING = "emulated"

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """How far a model's predictions are from those of its original."""

    kl: float  # mean over the tokens of KL(original || copy), nats
    same_token: float  # share of tokens after which both have the same most likely token
    num_tokens: int


def computing_backend() -> tuple[str, Backend]:
    """Create the first backend of this machine that computes. Raises BackendUnavailable."""
    names = [name for name in backend_names() if name != _NOT_COMPUTING]
    names.sort(key=lambda name: (name == "mlx") != (sys.platform == "darwin"))
    for name in names:
        try:
            return name, create_backend(name, BackendOptions(activation_type=ActivationType.FLOAT32))
        except BackendUnavailable:
            continue
    raise BackendUnavailable(
        "no backend is installed that computes",
        fact=f"{', '.join(names) or 'none'}: the libraries are missing",
        next_step="edgepipe update --extra torch, or --extra mlx on a Mac",
    )


def divergence(
    backend: Backend,
    original: WeightSource,
    copy: WeightSource,
    tokens: Sequence[int],
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Divergence:
    """Return the divergence of ``copy`` from ``original`` over a text.

    Loads both models slice by slice, so memory for about 1 GiB of weights is enough, or for one layer.
    ``on_progress`` gets the slices done and their number. Raises the errors of ``Backend.load``.
    """
    config = original.config
    size = min(WINDOW_TOKENS, config.context_length)
    windows = [np.array(tokens[start : start + size], np.int32) for start in range(0, len(tokens), size)]
    slices = _slices(original)
    expected: list[Any] = list(windows)
    found: list[Any] = list(windows)
    for done, part in enumerate(slices):
        on_progress(done, len(slices))
        expected = _run(backend, original, part, expected)
        found = _run(backend, copy, part, found)
    on_progress(len(slices), len(slices))
    pairs = [row for pair in zip(expected, found, strict=True) for row in zip(*pair, strict=True)]
    return Divergence(
        kl=float(np.mean([kl_divergence(reference, other) for reference, other in pairs])),
        same_token=float(np.mean([reference.argmax() == other.argmax() for reference, other in pairs])),
        num_tokens=len(pairs),
    )


def kl_divergence(reference: Logits, found: Logits) -> float:
    """Return KL(softmax(reference) || softmax(found)) of logits [V], nats."""
    log_p, log_q = _log_softmax(reference), _log_softmax(found)
    return float((np.exp(log_p) * (log_p - log_q)).sum())


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    return wide - np.log(np.exp(wide).sum())


def _slices(source: WeightSource) -> tuple[Slice, ...]:
    config = source.config
    layer_bytes = sum(info.num_bytes for info in source.weights(_one_layer(config)))
    step = max(1, _SLICE_BYTES // max(1, layer_bytes))
    starts = range(0, config.num_layers, step)
    ranges = [LayerRange(start, min(start + step, config.num_layers)) for start in starts]
    return make_slices(ranges, config.num_layers)


def _one_layer(config: ModelConfig) -> Slice:
    return Slice(index=1, layers=LayerRange(0, min(1, config.num_layers)), embedding=False, head=False)


def _run(backend: Backend, source: WeightSource, part: Slice, inputs: Sequence[Any]) -> list[Any]:
    """Run windows of token ids [T] or activations [T, H] through one slice: activations, or logits [T, V]."""
    backend.load([part], source, lambda _progress: None)
    num_blocks = -(-(max(len(window) for window in inputs) + REST_TOKENS) // DEFAULT_BLOCK_SIZE)
    backend.allocate_kv(num_blocks=num_blocks, block_size=DEFAULT_BLOCK_SIZE)
    outputs: list[Any] = []
    for index, window in enumerate(inputs):
        row = StepRow(sequence=SequenceId(index), position=0, num_tokens=len(window), runs=(BlockRun(0, num_blocks),))
        wanted = np.arange(len(window) if part.head else 0, dtype=np.int32)
        step = Step(step=StepId(index + 1), slice_index=part.index, rows=(row,), logit_rows=wanted)
        output = backend.collect(backend.submit(backend.prepare(step), window))
        outputs.append(output.logits if part.head else output.activations)
    return outputs
