"""The least time to a prompt's first token, by the data sheets of devices and links alone. PURE.

No scheduler takes part. A prompt in n chunks keeps the slowest server (a device, or a link with its uploads) busy for
all chunks, and its first chunk must pass all other servers, too. Few chunks fill the ring late, many repeat fixed work,
so the bound is the least of all n, for chunks of equal tokens and of equal time. A search of unequal chunks found none
that end much earlier than the best of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from edgepipe.backend.cost import StepWork
from edgepipe.simulation.imagined import Imagined

_COUNTS = (*range(1, 17), *range(18, 64, 3))  # numbers of chunks
_SIZES = (32, 64, 128, 256)  # tokens of small chunks: backends do not widen packed weights for up to 64
_PIECES = 16  # pieces of a prompt beside chats: the best size holds for each
_LATE = 0.11  # share by which a late turn is longer than the mean, over the root of its steps, which vary by 5 %
_GRID = 65  # positions between which a device's time is interpolated


class Bound(NamedTuple):
    """The least time to the first token."""

    seconds: float
    server: str  # the slowest one: "stage 1" or "link 1-2"
    alone_s: float  # its work in one piece
    chunks: int  # number of chunks with the least time


def lone_bound(cluster: Imagined, prompt_tokens: int) -> Bound:
    """Return the bound of a prompt in an idle ring."""
    ways = [
        edges
        for count in _COUNTS
        if count <= prompt_tokens
        for edges in (_equal_tokens(prompt_tokens, count), _equal_time(cluster, prompt_tokens, count))
    ]
    ways += [[*range(0, prompt_tokens, size), prompt_tokens] for size in _SIZES]
    least = min((_bound(cluster, edges) for edges in ways), key=lambda bound: bound.seconds)
    return least._replace(alone_s=max(map(sum, _servers(cluster, [0, prompt_tokens]).values())))


def beside_bound(cluster: Imagined, prompt_tokens: int, *, chats: int, context: int, most_turn_s: float) -> float:
    """Return the least seconds to a prompt's first token beside chats whose turns take at most ``most_turn_s``.

    Each chat decodes once in a turn, in a step with prompt tokens: its row is one prompt token less. At each position
    the steps in flight and their size are those with the most prompt tokens per second whose 99th percentile keeps the
    turn. ``context``: tokens of a chat. Infinite where no size keeps it.
    """
    piece, seconds, last_s = prompt_tokens / _PIECES, 0.0, 0.0
    for index in range(_PIECES):
        position = round((index + 0.5) * piece)
        steps = [
            _steady(cluster, position, size, in_flight, chats=chats, context=context)
            for size in (*range(8, 257, 8), *range(288, 2049, 32))
            for in_flight in range(1, 2 * len(cluster.ring.stages) + 2)
        ]
        kept = [(token_s, end_s) for turn_s, token_s, end_s in steps if turn_s <= most_turn_s]
        token_s, last_s = min(kept, default=(inf, 0.0))
        seconds += piece * token_s
    return seconds + last_s


def _steady(
    cluster: Imagined, position: int, size: int, in_flight: int, *, chats: int, context: int
) -> tuple[float, float, float]:
    """Return the 99th percentile of a turn of so many equal steps, the mean seconds for each prompt token, and those
    from the last step's turn to the prompt's end.
    """
    rows = chats // in_flight
    tokens = size - chats / in_flight
    if tokens < 1:
        return inf, inf, 0.0
    starts, counts = (position, *[context] * rows), (size - rows, *[1] * rows)
    work = StepWork.of_rows(starts, counts, logit_rows=rows)
    stages = cluster.ring.stages
    times = [stage.step_s(work) for stage in stages]
    times += [stage.link.upload_s(stage.token_bytes * size) for stage in stages[:-1]]
    alone_s = sum(times) + sum(cluster.ring.delays_s(work))
    turn_s = max(alone_s, in_flight * max(times))
    late = 1 + _LATE / in_flight**0.5
    return turn_s * late, turn_s / in_flight / tokens, alone_s - turn_s / in_flight


def _bound(cluster: Imagined, edges: Sequence[int]) -> Bound:
    """Return the bound of chunks between these positions, the first 0 and the last the prompt's length."""
    servers = _servers(cluster, edges)
    slowest = max(servers, key=lambda name: sum(servers[name]))
    busy_s = sum(servers[slowest])
    others_s = sum(times[0] for name, times in servers.items() if name != slowest)
    delays_s = sum(cluster.ring.delays_s(_chunk(0, edges[1], last=len(edges) == 2)))
    return Bound(busy_s + others_s + delays_s, slowest, busy_s, len(edges) - 1)


def _servers(cluster: Imagined, edges: Sequence[int]) -> dict[str, list[float]]:
    """Return the seconds of each chunk on every device and link."""
    stages = cluster.ring.stages
    chunks = [_chunk(start, end, last=end == edges[-1]) for start, end in pairwise(edges)]
    servers = {f"stage {index}": [stage.step_s(chunk) for chunk in chunks] for index, stage in enumerate(stages)}
    for index, stage in enumerate(stages[:-1]):
        uploads = [stage.link.upload_s(stage.token_bytes * chunk.tokens) for chunk in chunks]
        servers[f"link {index}-{index + 1}"] = uploads
    return servers


def _chunk(start: int, end: int, *, last: bool) -> StepWork:
    return StepWork.of_rows((start,), (end - start,), logit_rows=int(last))


def _equal_tokens(prompt_tokens: int, count: int) -> list[int]:
    return [round(prompt_tokens * index / count) for index in range(count + 1)]


def _equal_time(cluster: Imagined, prompt_tokens: int, count: int) -> list[int]:
    """Return edges with equal work between them on the device that computes longest."""

    def whole_s(step_s: Callable[[StepWork], float]) -> float:
        return step_s(_chunk(0, prompt_tokens, last=False))

    step_s = max((stage.step_s for stage in cluster.ring.stages), key=whole_s)
    positions = np.linspace(1, prompt_tokens, _GRID)
    seconds = [step_s(_chunk(0, round(position), last=False)) for position in positions.tolist()]
    edges = np.interp(np.linspace(seconds[0], seconds[-1], count + 1), seconds, positions)
    inner = sorted({round(edge) for edge in edges[1:-1].tolist()} - {0, prompt_tokens})
    return [0, *inner, prompt_tokens]
