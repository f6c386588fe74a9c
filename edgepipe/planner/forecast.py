"""Forecast of a placement: times of its stages and links, micro-batches, tokens per second, first words. PURE.

Uses the models of ``edgepipe.scheduler``: devices and links are servers, latency is not (``sizing``), and the pacer
that engines use chooses the chunks of prompts (``pacing``). The same figures apply to searched, hand-written and
running placements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import ceil

from edgepipe.backend.cost import StepWork
from edgepipe.ids import NodeId
from edgepipe.planner.demand import Demand, batch_parts
from edgepipe.planner.hosts import hop_host_s, turn_host_s
from edgepipe.planner.placement import Placed
from edgepipe.planner.profiles import Link, Links, Machine
from edgepipe.scheduler import make_policy
from edgepipe.scheduler.pacing import Chunk, Pacer, RingTimes, Waiting
from edgepipe.scheduler.sizing import most_micro_batches
from edgepipe.units import LinkShape

_NOTHING = LinkShape()
_PIECES = 8  # parts of a prompt, each with the chunks of its beginning: attention grows with the position
_CHOICES = 3  # choices among which is the size that most chunks have
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForecast:
    """Predicted way of one prompt through a ring."""

    prompt_tokens: int
    first_token_s: float  # time from its arrival to its first token
    chunk_tokens: int  # prompt tokens of a step in the middle of the prompt
    chunk_s: float  # time of such a step on the slowest device or link
    in_flight: int  # P, steps with its tokens in flight
    bound: str  # bound of the steps: "stage 1", "link 0-1", or "goal"


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

    def prompt(
        self, prompt_tokens: int, *, beside: Forecast | None = None, goal_s: float | None = None
    ) -> PromptForecast:
        """Return the forecast of one prompt in an idle ring, or ``beside`` sequences that decode.

        ``goal_s``: time that the prompt may add to a decode's turn; None: no bound.
        """
        times = self._times()
        pacer = Pacer(times, most_tokens=make_policy("throttled").most_prefill_tokens, goal_s=goal_s)
        position, passed_s, last_s = 0, 0.0, 0.0
        middle: PromptForecast | None = None
        while position < prompt_tokens:
            waiting = self._waiting(position, prompt_tokens, beside)
            chunk = _settled(pacer, waiting)
            rows = ceil(waiting.decodes / min(waiting.micro_batches, chunk.in_flight))
            tokens = min(max(1, chunk.step_tokens - rows), waiting.left)
            server_s, turn_s = _passage(times, _step_with_chunk(position, tokens, rows=rows, context=waiting.context))
            period_s = max(server_s, turn_s / chunk.in_flight)
            if middle is None or position <= prompt_tokens // 2:
                middle = PromptForecast(
                    prompt_tokens=prompt_tokens,
                    first_token_s=0.0,
                    chunk_tokens=tokens,
                    chunk_s=server_s,
                    in_flight=chunk.in_flight,
                    bound=chunk.bound,
                )
            alike = max(1, prompt_tokens // _PIECES // tokens) * tokens  # tokens of the chunks that take as long
            alike = min(alike, waiting.left)
            passed_s += alike / tokens * period_s
            last_s = turn_s - period_s
            position += alike
        if middle is None:
            raise ValueError("a prompt has at least one token")
        return replace(middle, first_token_s=passed_s + last_s)

    def _waiting(self, position: int, prompt_tokens: int, beside: Forecast | None) -> Waiting:
        return Waiting(
            prompt=0,
            position=position,
            left=prompt_tokens - position,
            others=0,
            decodes=0 if beside is None else beside.sequences,
            context=self._demand.read_tokens,
            micro_batches=1 if beside is None else beside.micro_batches,
            protected=beside is not None,
            begun=position,
        )

    def _times(self) -> RingTimes:
        """Return the times of steps, as an engine measures them."""
        devices: dict[NodeId, list[Callable[[StepWork], float]]] = {}
        for machine, stage in zip(self._machines, self._placed, strict=True):
            devices.setdefault(stage.node_id, []).append(partial(_slice_s, machine, stage))
        row = [
            _hop(link, self._demand.hop_bytes, host) for link, host in zip(self._links, self._hosts_s[1:], strict=True)
        ]
        latency_s = self._home_s + turn_host_s(self._hosts_s[0], 1) + sum(hop.latency_s for hop in row)
        return RingTimes(
            stages=list(devices.values()),
            uploads=[partial(_uploaded_s, hop.upload_s) for hop in row],
            latency_s=lambda: latency_s,
        )

    def _bottleneck(self, busy: Mapping[NodeId, float], uploads: Sequence[float], server_s: float) -> str:
        for index, stage in enumerate(self._placed):
            if busy[stage.node_id] == server_s:
                return f"stage {index}"
        index = uploads.index(server_s)
        return f"link {index}-{index + 1}"


def _settled(pacer: Pacer, waiting: Waiting) -> Chunk:
    """Return the fastest of some successive choices: each search begins at the size before, and may end far from it."""
    chunks = [chunk for _ in range(_CHOICES) if (chunk := pacer.chunk(waiting)) is not None]
    return min(chunks, key=lambda chunk: chunk.seconds / chunk.step_tokens)


def _slice_s(machine: Machine, stage: Placed, work: StepWork) -> float:
    return machine.speed.parts(work).slice_s(stage.part)


def _uploaded_s(token_s: float, num_tokens: int) -> float:
    return token_s * num_tokens


def _step_with_chunk(start: int, tokens: int, *, rows: int, context: int) -> StepWork:
    """Return the work of a chunk and of ``rows`` decodes that attend to ``context`` tokens each."""
    return StepWork.of_rows([start, *[context] * rows], [tokens, *[1] * rows], logit_rows=rows)


def _passage(times: RingTimes, work: StepWork) -> tuple[float, float]:
    """Return a step's seconds on the slowest device or link, and its turn."""
    servers = [sum(step_s(work) for step_s in slices) for slices in times.stages]
    servers += [upload_s(work.tokens) for upload_s in times.uploads]
    return max(servers), sum(servers) + times.latency_s()


def _hop(link: Link | None, num_bytes: float, host_s: float) -> Hop:
    if link is None:
        return Hop(link=Link(shape=_NOTHING, measured=True), upload_s=0.0, host_s=0.0)
    return Hop(link=link, upload_s=num_bytes / link.shape.bytes_per_s, host_s=hop_host_s(host_s, num_bytes))
