"""Recurrences of long rows in chunks of 64 tokens: what needs no state is computed for all chunks at once.

Only the states pass from chunk to chunk, in a few products each. H heads, L tokens, n chunks of c tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_CHUNK = 64  # tokens that are computed side by side

_Chunks = Callable[..., tuple[list[mx.array], mx.array]]


def delta_tokens(
    queries: mx.array, keys: mx.array, values: mx.array, log_decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the outputs [H, L, V] of L tokens, and the memory [H, K, V] behind them.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, section 3.3.

    queries, keys    [H, L, K]
    values           [H, L, V]
    log_decay, beta  [H, L]
    memory           [H, K, V] before the tokens
    """
    return _in_chunks(_delta_chunks, (queries, keys, values, log_decay, beta), memory)


def scan_tokens(
    x: mx.array, into: mx.array, out_of: mx.array, log_decay: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the outputs [H, L, D] of L tokens, and the memory [H, D, N] behind them.

    Source: Dao, Gu 2024, Transformers are SSMs, section 6.

    x             [H, L, D] times dt
    into, out_of  [H, L, N]: B and C
    log_decay     [H, L]
    memory        [H, D, N] before the tokens
    """
    return _in_chunks(_scan_chunks, (x, into, out_of, log_decay), memory)


def unit_inverse(strict: mx.array) -> mx.array:
    """Return the inverse of ``I + strict`` [..., c, c], whose strict part lies below the diagonal.

    Inverts blocks of 1, 2, 4, ... rows: of a block [[A, 0], [B, C]] the inverse has -C^-1 B A^-1 for B (Golub, Van
    Loan, Matrix Computations, section 3.1). MLX's own inverse runs on the CPU, for which a GPU would wait.
    """
    size = strict.shape[-1]
    joins = mx.array(_joins(size))
    inverse = mx.eye(size) - strict * joins[0]
    for join in joins[1:]:
        inverse = inverse - inverse @ (strict * join) @ inverse
    return inverse


@cache
def _joins(size: int) -> npt.NDArray[np.float32]:
    """Return [levels, c, c]: 1 where level l joins two blocks of 2^l rows, left of the diagonal."""
    levels = max(1, (size - 1).bit_length())
    blocks = np.arange(size) >> np.arange(levels)[:, None]  # [levels, c] block of each row at each level
    rows, columns = blocks[:, :, None], blocks[:, None]
    return ((rows == columns + 1) & (rows % 2 == 1)).astype(np.float32)


def _in_chunks(compute: _Chunks, tokens: tuple[mx.array, ...], memory: mx.array) -> tuple[mx.array, mx.array]:
    """Compute whole chunks at once, and the rest as one."""
    outs: list[mx.array] = []
    for start, count, size in _parts(tokens[0].shape[1]):
        parts = (mx.unflatten(each[:, start : start + count * size], 1, (count, size)) for each in tokens)
        found, memory = compute(*parts, memory)
        outs += found
    return mx.concatenate(outs, axis=1), memory


def _parts(num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield the first token, number and size of chunks that are computed at once."""
    whole, rest = divmod(num_tokens, _CHUNK)
    if whole:
        yield 0, whole, _CHUNK
    if rest:
        yield whole * _CHUNK, 1, rest


def _since(total: mx.array) -> mx.array:
    """Return the decay from token j to token i [H, n, c, c], 0 for later j, by sums of its logarithm [H, n, c]."""
    return mx.tril(mx.exp(mx.minimum(total[..., None] - total[..., None, :], 0.0)))


@partial(mx.compile, shapeless=True)  # one kernel on Metal
def _carried(memory: mx.array, kept: mx.array, added: mx.array) -> mx.array:
    return memory * kept + added


def _delta_chunks(
    queries: mx.array, keys: mx.array, values: mx.array, log_decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[list[mx.array], mx.array]:
    """See ``delta_tokens``, with tokens [H, n, c, ..]. Returns each chunk's outputs."""
    total = mx.cumsum(log_decay, axis=-1)  # sum of each token's log decay and those before it
    since, grown = _since(total), mx.exp(total)[..., None]
    scaled = keys * beta[..., None]
    # What a token writes depends on those before it: a unit triangular system, linear in values and memory.
    inverse = unit_inverse(mx.tril((scaled @ keys.swapaxes(-1, -2)) * since, -1))
    wanted, known = inverse @ (values * beta[..., None]), inverse @ (scaled * grown)
    kept = mx.exp(total[..., -1])[..., None, None]
    left = (keys * mx.exp(total[..., -1:] - total)[..., None]).swapaxes(-1, -2)
    within, asked = (queries @ keys.swapaxes(-1, -2)) * since, queries * grown
    outs: list[mx.array] = []
    for at in range(keys.shape[1]):
        error = mx.addmm(wanted[:, at], known[:, at], memory, alpha=-1.0)
        outs.append(mx.addmm(asked[:, at] @ memory, within[:, at], error))
        memory = _carried(memory, kept[:, at], left[:, at] @ error)
    return outs, memory


def _scan_chunks(
    x: mx.array, into: mx.array, out_of: mx.array, log_decay: mx.array, memory: mx.array
) -> tuple[list[mx.array], mx.array]:
    """See ``scan_tokens``, with tokens [H, n, c, ..]. Returns each chunk's outputs."""
    total = mx.cumsum(log_decay, axis=-1)
    left = mx.exp(total[..., -1:] - total)[..., None]
    added = (x * left).swapaxes(-1, -2) @ into  # [H, n, D, N] by each chunk
    kept = mx.exp(total[..., -1])[..., None, None]
    within = ((out_of @ into.swapaxes(-1, -2)) * _since(total)) @ x
    asked = out_of * mx.exp(total)[..., None]
    outs: list[mx.array] = []
    for at in range(x.shape[1]):
        outs.append(mx.addmm(within[:, at], asked[:, at], memory.swapaxes(-1, -2)))
        memory = _carried(memory, kept[:, at], added[:, at])
    return outs, memory
