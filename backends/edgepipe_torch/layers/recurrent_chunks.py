"""Recurrences of long rows in chunks of 64 tokens: what needs no state is computed for many chunks at once.

Only the states pass from chunk to chunk, in two or three operations each. H heads, L tokens, n chunks of c tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_CHUNK = 64  # tokens that are computed side by side
_MOST_CHUNKS = 32  # limit of chunks at once: they take memory, 128 MB for 32 heads of 128 by 128

_Chunks = Callable[..., tuple[Tensor, Tensor]]


def delta_tokens(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [H, L, V] of L tokens, and the memory [H, K, V] behind them.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, section 3.3.

    queries, keys    [H, L, K]
    values           [H, L, V]
    log_decay, beta  [H, L]
    memory           [H, K, V] before the tokens
    """
    return _in_chunks(_delta_chunks, (queries, keys, values, log_decay, beta), memory)


def scan_tokens(x: Tensor, into: Tensor, out_of: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [H, L, D] of L tokens, and the memory [H, D, N] behind them.

    Source: Dao, Gu 2024, Transformers are SSMs, section 6.

    x             [H, L, D] times dt
    into, out_of  [H, L, N]: B and C
    log_decay     [H, L]
    memory        [H, D, N] before the tokens
    """
    return _in_chunks(_scan_chunks, (x, into, out_of, log_decay), memory)


def _in_chunks(compute: _Chunks, tokens: tuple[Tensor, ...], memory: Tensor) -> tuple[Tensor, Tensor]:
    """Compute whole chunks, many at once, and the rest as one."""
    outs: list[Tensor] = []
    for start, count, size in _parts(tokens[0].shape[1]):
        parts = (each[:, start : start + count * size].unflatten(1, (count, size)) for each in tokens)
        out, memory = compute(*parts, memory)
        outs.append(out.flatten(1, 2))
    return torch.cat(outs, 1) if len(outs) > 1 else outs[0], memory


def _parts(num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield the first token, number and size of chunks that are computed at once."""
    whole, rest = divmod(num_tokens, _CHUNK)
    for start in range(0, whole, _MOST_CHUNKS):
        yield start * _CHUNK, min(_MOST_CHUNKS, whole - start), _CHUNK
    if rest:
        yield whole * _CHUNK, 1, rest


def _since(total: Tensor) -> Tensor:
    """Return the decay from token j to token i [H, n, c, c], 0 for later j, by sums of its logarithm [H, n, c]."""
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp_().tril_()


def _delta_chunks(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``delta_tokens``, with tokens [H, n, c, ..]."""
    total = log_decay.cumsum(-1)
    since, grown = _since(total), total.exp().unsqueeze(-1)
    scaled = keys * beta.unsqueeze(-1)
    # What a token writes depends on those before it: a unit triangular system, linear in values and memory.
    system = (scaled @ keys.transpose(-1, -2)).mul_(since)
    given = torch.cat([values * beta.unsqueeze(-1), scaled.mul_(grown)], -1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    wanted, known = solved.split([values.shape[-1], keys.shape[-1]], -1)
    kept = total[..., -1].exp()[..., None, None]
    left = (keys * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    memories = memory.new_empty(keys.shape[1] + 1, *memory.shape)
    errors = values.new_empty(keys.shape[1], *values[:, 0].shape)
    memories[0] = memory
    for at, error in enumerate(errors):
        torch.baddbmm(wanted[:, at], known[:, at], memories[at], alpha=-1, out=error)
        torch.baddbmm(memories[at] * kept[:, at], left[:, at], error, out=memories[at + 1])
    out = (queries * grown) @ memories[:-1].transpose(0, 1)
    out += (queries @ keys.transpose(-1, -2)).mul_(since) @ errors.transpose(0, 1)
    return out, memories[-1]


def _scan_chunks(x: Tensor, into: Tensor, out_of: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """See ``scan_tokens``, with tokens [H, n, c, ..]."""
    total = log_decay.cumsum(-1)
    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    added = (x * left).transpose(-1, -2) @ into  # [H, n, D, N] by each chunk
    kept = total[..., -1].exp()[..., None, None]
    memories = memory.new_empty(x.shape[1] + 1, *memory.shape)
    memories[0] = memory
    for at in range(x.shape[1]):
        torch.addcmul(added[:, at], memories[at], kept[:, at], out=memories[at + 1])
    out = (out_of @ into.transpose(-1, -2)).mul_(_since(total)) @ x
    out += (out_of * total.exp().unsqueeze(-1)) @ memories[:-1].permute(1, 0, 3, 2)
    return out, memories[-1]
