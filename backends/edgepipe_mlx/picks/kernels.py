"""Pick the most likely tokens of logits: by Metal kernels, and by plain operations as reference.

R rows, V vocabulary, W words of masks, K candidates.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

_OWN_OF_PART = 16  # tokens of a thread
_THREADS_OF_PART = 256
_PART = _OWN_OF_PART * _THREADS_OF_PART
_THREADS_OF_JOIN = 512
_MOST_OF_JOIN = 64  # tokens of a thread, whose keys lie in registers
_ENDS = 4  # numbers of a part beside its tokens, see ``select.metal``
_FORBIDDEN, _ZERO, _NO_NUMBER = 0x007FFFFF, 0x80000000, 0xFFFFFFFF  # keys, see ``select.metal``
_LOW = 0xFFFFFFFF
_PIECE = 512  # values that are added one after another


class PickKernels(Protocol):
    """Picks exactly: the highest logits, equal ones by ascending id, and NaN above all. Sums are float32."""

    def pick(
        self, logits: mx.array, changed: mx.array, masks: mx.array | None, temperatures: mx.array, count: int
    ) -> mx.array:
        """Return [R, 3 K + 2] uint32, bits of the fields of ``PickedCandidates`` from ``ids`` to ``raw_log_totals``.

        logits        [R, V] float32
        changed       [R, V] float32; ``logits`` itself, if none is edited
        masks         [R, W] int32, at least eight words; None: all tokens are allowed
        temperatures  at least eight, the first R of the rows
        count         K, at most V
        """
        ...


def serves(vocabulary: int, count: int) -> bool:
    """Return whether the kernels can pick so many of a vocabulary."""
    return _own_of_join(vocabulary, count) <= _MOST_OF_JOIN


def _own_of_join(vocabulary: int, count: int) -> int:
    return -(-_parts(vocabulary) * count // _THREADS_OF_JOIN)


def _parts(vocabulary: int) -> int:
    return -(-vocabulary // _PART)


@cache
def _source(name: str) -> str:
    return (Path(__file__).parent / f"{name}.metal").read_text(encoding="utf-8")


class MetalPicks:
    """Own kernels. MLX compiles a form when it is first used, and raises RuntimeError where that fails."""

    def __init__(self) -> None:
        make: Any = mx.fast.metal_kernel
        self._parts = make(
            name="edgepipe_pick_parts",
            input_names=["logits", "changed", "masks", "temperatures"],
            output_names=["left"],
            header=_source("select"),
            source=_source("parts"),
        )
        self._join = make(
            name="edgepipe_pick_join",
            input_names=["left", "logits", "temperatures"],
            output_names=["picked"],
            header=_source("select"),
            source=_source("join"),
        )

    def pick(
        self, logits: mx.array, changed: mx.array, masks: mx.array | None, temperatures: mx.array, count: int
    ) -> mx.array:
        """See ``PickKernels``."""
        rows, vocabulary = logits.shape
        parts = _parts(vocabulary)
        left = self._parts(
            inputs=[logits, changed, _no_masks() if masks is None else masks, temperatures],
            template=[
                ("COUNT", count),
                ("OWN", _OWN_OF_PART),
                ("THREADS", _THREADS_OF_PART),
                ("MASKED", int(masks is not None)),
                ("CHANGED", int(masks is not None or changed is not logits)),
            ],
            grid=(_THREADS_OF_PART, parts, rows),
            threadgroup=(_THREADS_OF_PART, 1, 1),
            output_shapes=[(rows, parts, 2 * count + _ENDS)],
            output_dtypes=[mx.uint32],
        )[0]
        return self._join(
            inputs=[left, logits, temperatures],
            template=[
                ("COUNT", count),
                ("OWN", _own_of_join(vocabulary, count)),
                ("THREADS", _THREADS_OF_JOIN),
            ],
            grid=(_THREADS_OF_JOIN, rows, 1),
            threadgroup=(_THREADS_OF_JOIN, 1, 1),
            output_shapes=[(rows, 3 * count + 2)],
            output_dtypes=[mx.uint32],
        )[0]


@cache
def _no_masks() -> mx.array:
    return mx.zeros((1, 8), mx.int32)


class ReferencePicks:
    """The same by plain operations, for MLX's CPU device."""

    def pick(
        self, logits: mx.array, changed: mx.array, masks: mx.array | None, temperatures: mx.array, count: int
    ) -> mx.array:
        """See ``PickKernels``."""
        rows, vocabulary = logits.shape
        ids = mx.arange(vocabulary, dtype=mx.uint32)
        keys = _keys(changed)
        if masks is not None:
            allowed = mx.right_shift(masks[:, ids // 32], (ids % 32).astype(mx.int32)) & 1
            keys = mx.where(allowed == 1, keys, mx.array(_FORBIDDEN, mx.uint32))
        # One number for a key and its id, so that the order is total.
        ordered = mx.sort((keys.astype(mx.uint64) << 32) | (_LOW - ids).astype(mx.uint64), axis=1)[:, ::-1][:, :count]
        best_ids, best = _LOW - ordered.astype(mx.uint32), _values((ordered >> 32).astype(mx.uint32))
        totals = _total(mx.exp((_values(keys) - best[:, :1]) / temperatures[:rows, None]))
        highest = logits.max(axis=1, keepdims=True)
        log_totals = highest + mx.log(_total(mx.exp(logits - highest)))
        floats = [best, mx.take_along_axis(logits, best_ids, axis=1), totals, log_totals]
        return mx.concatenate([best_ids, *(each.view(mx.uint32) for each in floats)], axis=1)


def _total(values: mx.array) -> mx.array:
    """Return the sums [R, 1] of values [R, V], in pieces: MLX's CPU device adds one value after another."""
    rows, count = values.shape
    pieces = mx.pad(values, [(0, 0), (0, -count % _PIECE)]).reshape(rows, -1, _PIECE)
    return pieces.sum(axis=2).sum(axis=1, keepdims=True)


def _keys(values: mx.array) -> mx.array:
    """Return unsigned numbers in the order of the values, as ``select.metal`` has them."""
    bits = values.view(mx.uint32)
    size = bits & 0x7FFFFFFF
    ordered = mx.where(bits >> 31 == 1, ~bits, bits | _ZERO)
    ordered = mx.where(size == 0, mx.array(_ZERO, mx.uint32), ordered)
    return mx.where(size > 0x7F800000, mx.array(_NO_NUMBER, mx.uint32), ordered)


def _values(keys: mx.array) -> mx.array:
    return mx.where(keys >> 31 == 1, keys & 0x7FFFFFFF, ~keys).view(mx.float32)
