"""Forecast of a placement: times of its stages and links, micro-batches, tokens per second. PURE.

Uses the model of ``edgepipe.scheduler.sizing``: devices and links are servers, latency is not. The same figures apply
to searched, hand-written and running placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from edgepipe.ids import NodeId
from edgepipe.planner.demand import Demand, batch_parts, prompt_work
from edgepipe.planner.hosts import hop_host_s, turn_host_s
from edgepipe.planner.placement import Placed
from edgepipe.planner.profiles import Link, Links, Machine
from edgepipe.scheduler.sizing import most_micro_batches
from edgepipe.units import LinkShape

_NOTHING = LinkShape()
_CHUNK_TOKENS = 512  # prompt tokens of one chunk
_EQUAL = 0.01  # forecasts that differ by less count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """The hop from one slice to the next slice's node."""

    link: Link
    upload_s: float  # upload of one micro-batch; 0 if both slices are on one node
    host_s: float  # added by the receiving host

    @property
    def latency_s(self) -> float:
        """Time besides the upload."""
        return self.link.shape.one_way_s + self.host_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted performance of a ring with S sequences in M micro-batches."""

    micro_batches: int
    sequences: int
    step_s: tuple[float, ...]  # time of one micro-batch on each slice
    hops: tuple[Hop, ...]  # hops between the slices
    closing_s: float  # time from the last slice's logits to the first slice's next step
    server_s: float  # T, the slowest device or link
    turn_s: float
    tokens_per_s: float
    bottleneck: str  # "stage 1", "link 1-2", counted from 0


class Ring:
    """A placement with its machines and links."""

    def __init__(
        self, demand: Demand, placed: Sequence[Placed], machines: Mapping[NodeId, Machine], links: Links
    ) -> None:
        """Raises LinkNotMeasured for a link without figures."""
        self._demand = demand
        self._placed = tuple(placed)
        self._machines = [machines[stage.node_id].with_ram_percent(stage.ram_percent) for stage in placed]
        ids = [stage.node_id for stage in placed]
        self._links = [None if a == b else links.hop(a, b) for a, b in pairwise(ids)]
        self._hosts_s = [links.host_s(node) for node in ids]
        self._home_s = links.home_s(ids[-1], ids[0], ids)

    def of(self, micro_batches: int, sequences: int) -> Forecast:
        """Return the forecast for S sequences in M micro-batches."""
        rows = sequences / micro_batches
        steps, hops = self._steps_s(rows), self._hops(rows)
        busy: dict[NodeId, float] = {}
        for stage, seconds in zip(self._placed, steps, strict=True):
            busy[stage.node_id] = busy.get(stage.node_id, 0.0) + seconds
        uploads = [hop.upload_s for hop in hops]
        server_s = max([*busy.values(), *uploads])
        closing_s = self._home_s + turn_host_s(self._hosts_s[0], rows)
        largest = ceil(rows)  # all micro-batches wait for the turn of the largest
        latency_s = sum(hop.latency_s for hop in hops) + closing_s
        turn_s = sum(self._steps_s(largest)) + sum(hop.upload_s for hop in self._hops(largest)) + latency_s
        return Forecast(
            micro_batches=micro_batches,
            sequences=sequences,
            step_s=tuple(steps),
            hops=tuple(hops),
            closing_s=closing_s,
            server_s=server_s,
            turn_s=turn_s,
            tokens_per_s=sequences / max(micro_batches * server_s, turn_s, 1e-9),
            bottleneck=self._bottleneck(busy, uploads, server_s),
        )

    def _steps_s(self, rows: float) -> list[float]:
        """Return each slice's time for a micro-batch of ``rows`` rows."""
        return [
            batch_parts(machine.speed, self._demand, rows).slice_s(stage.part)
            for machine, stage in zip(self._machines, self._placed, strict=True)
        ]

    def _hops(self, rows: float) -> list[Hop]:
        num_bytes = rows * (1 + self._demand.prompt_share) * self._demand.hop_bytes
        return [_hop(link, num_bytes, host_s) for link, host_s in zip(self._links, self._hosts_s[1:], strict=True)]

    def best(self, sequences: int) -> Forecast:
        """Return the forecast with the best M, the smallest among equals."""
        most = min(sequences, most_micro_batches(len(self._placed)))
        forecasts = [self.of(micro_batches, sequences) for micro_batches in range(1, most + 1)]
        enough = max(forecast.tokens_per_s for forecast in forecasts) * (1 - _EQUAL)
        return next(forecast for forecast in forecasts if forecast.tokens_per_s >= enough)

    def first_token_s(self, prompt_tokens: int) -> float:
        """Return the seconds from a prompt's arrival in an idle ring to its first token; its chunks are pipelined."""
        chunks = max(1, ceil(prompt_tokens / _CHUNK_TOKENS))
        size = ceil(prompt_tokens / chunks)
        way_s, slowest_s = self._home_s + turn_host_s(self._hosts_s[0], 1), 0.0
        for index, (machine, stage) in enumerate(zip(self._machines, self._placed, strict=True)):
            work = prompt_work(size, start=(chunks - 1) * size // 2, logits=stage.part.head)
            seconds = machine.speed.parts(work).slice_s(stage.part)
            way_s, slowest_s = way_s + seconds, max(slowest_s, seconds)
            if index < len(self._links) and (link := self._links[index]) is not None:
                hop = _hop(link, size * self._demand.hop_bytes, self._hosts_s[index + 1])
                way_s, slowest_s = way_s + hop.upload_s + hop.latency_s, max(slowest_s, hop.upload_s)
        return way_s + (chunks - 1) * slowest_s

    def _bottleneck(self, busy: Mapping[NodeId, float], uploads: Sequence[float], server_s: float) -> str:
        for index, stage in enumerate(self._placed):
            if busy[stage.node_id] == server_s:
                return f"stage {index}"
        index = uploads.index(server_s)
        return f"link {index}-{index + 1}"


def _hop(link: Link | None, num_bytes: float, host_s: float) -> Hop:
    if link is None:
        return Hop(link=Link(shape=_NOTHING, measured=True), upload_s=0.0, host_s=0.0)
    return Hop(link=link, upload_s=num_bytes / link.shape.bytes_per_s, host_s=hop_host_s(host_s, num_bytes))
