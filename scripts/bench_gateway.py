"""The gateway: what HTTP adds to the engine's own time to first token, and many streams at once.

Run as ``scripts/bench gateway [--full]``. Nodes, engine, stages and gateway are real processes, only the devices'
arithmetic is emulated. The client speaks HTTP over bare sockets: its own work must not be measured.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

import httpx
from figures import Row, below, print_rows

from edgepipe.cli.bench.client import BenchClient, connected
from edgepipe.cli.bench.cluster import EmulatedCluster, emulated_cluster
from edgepipe.cli.bench.run import serve_model
from edgepipe.link.admin_client import Admin
from edgepipe.shapes.loader import named_shape
from edgepipe.simulation.workload import Arrivals, FixedLengths, LognormalLengths, Workload, WorkloadSpec, make_workload
from edgepipe.wire.common import Hello
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import ServeRequest

MODEL = "qwen2.5-14b"
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 48
STREAMS = 16
MANY = 200
HEARTBEAT_GAP_MS = 500
ADDED_TTFT_MS = 15


@dataclass(slots=True, kw_only=True)
class Stream:
    """One streamed answer as its client saw it."""

    began_s: float
    times_s: list[float] = field(default_factory=list[float])  # times of events with tokens
    finished: bool = False


async def ask(port: int, prompt: list[int], *, max_tokens: int) -> Stream:
    """A streamed completion over a connection of its own. Tokens are looked for, not text: emulated models write bytes,
    and half of those only become text with the bytes behind them."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    body["return_token_ids"] = True
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    stream = Stream(began_s=time.monotonic())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                stream.finished = True
                break
            if json.loads(line[6:])["choices"][0].get("token_ids"):
                stream.times_s.append(time.monotonic())
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    return stream


def workload(*, num_requests: int, concurrency: int, output_tokens: int = OUTPUT_TOKENS, seed: int = 1) -> Workload:
    """Users who ask again as soon as they were answered, each after another number of tokens: they do not stay in
    step. Prompts have no common beginning."""
    return make_workload(
        WorkloadSpec(
            arrivals=Arrivals.CLOSED,
            concurrency=concurrency,
            num_requests=num_requests,
            prompt=FixedLengths(tokens=PROMPT_TOKENS),
            output=LognormalLengths(median_tokens=output_tokens, max_tokens=2 * output_tokens),
            seed=seed,
        )
    )


async def by_engine(client: BenchClient, load: Workload, *, num_stages: int) -> list[float]:
    """Times to first token straight from the engine, ms."""
    measured = await client.run(load, num_stages=num_stages)
    return [(record.token_times_s[0] - record.arrival_s) * 1e3 for record in measured.requests]


async def by_http(port: int, load: Workload) -> list[Stream]:
    """The same requests through the gateway."""
    users = asyncio.Semaphore(load.concurrency or len(load.requests))
    prompts = [list(load.prompt_ids(request)) for request in load.requests]

    async def one(prompt: list[int], max_tokens: int) -> Stream:
        async with users:
            return await ask(port, prompt, max_tokens=max_tokens)

    pairs = zip(load.requests, prompts, strict=True)
    return list(await asyncio.gather(*(one(prompt, request.output_tokens) for request, prompt in pairs)))


def first_ms(stream: Stream) -> float:
    """Time to its first token, ms."""
    return (stream.times_s[0] - stream.began_s) * 1e3


def gaps_ms(streams: list[Stream]) -> list[float]:
    """Between two events with tokens, ms."""
    return [(b - a) * 1e3 for s in streams for a, b in zip(s.times_s, s.times_s[1:], strict=False)]


def p99(values: list[float]) -> float:
    """The value that one in a hundred exceeds."""
    return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]


async def http_rows(full: bool) -> list[Row]:
    """Two stages on two nodes; both ways in turn, several times, so that drift meets both alike."""
    cluster = EmulatedCluster(
        devices=["rtx4090", "rtx4090"], model=MODEL, config=named_shape(MODEL), link="1gbit,0.3ms"
    )
    async with emulated_cluster(cluster) as admin:
        port = await _http_port(admin)
        engine = await serve_model(admin, ServeRequest(options=ServeSpec(model=MODEL, num_nodes=2)))
        status = await admin.status()
        hello = Hello(role="gateway", node_id=status.node_id, node_name="bench", cluster_id=status.cluster_id)
        stages = len(engine.stages)
        direct: list[float] = []
        through: list[Stream] = []
        own_ms: list[float] = []  # the engine's own time of the requests that went through, mean per turn
        async with admin.act_as_gateway() as security, connected(engine, hello, security) as client:
            for turn in range(9 if full else 4):  # the first warms up
                load = workload(num_requests=4 * STREAMS, concurrency=STREAMS, seed=2 * turn)
                other = workload(num_requests=4 * STREAMS, concurrency=STREAMS, seed=2 * turn + 1)
                one = await by_engine(client, load, num_stages=stages)
                before = await _engine_time(port)
                two = await by_http(port, other)
                after = await _engine_time(port)
                if turn:
                    direct += one
                    through += two
                    own_ms.append((after[0] - before[0]) / (after[1] - before[1]) * 1e3)
                _say(
                    f"turn {turn}: engine {statistics.median(one):.1f} ms, "
                    f"gateway {statistics.median(map(first_ms, two)):.1f} ms"
                )
        rows = _added_rows(direct, through, statistics.mean(own_ms))
        return rows + await _many_rows(admin, port, full)


async def _engine_time(port: int) -> tuple[float, float]:
    """Seconds from the gateway's request to the engine's first token, summed up, and of how many requests."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:1] != "#"}
    name = "edgepipe_request_prefill_time_seconds"
    return found.get(f"{name}_sum", 0.0), found.get(f"{name}_count", 0.0)


def _added_rows(direct: list[float], through: list[Stream], own_ms: float) -> list[Row]:
    """Two ways to tell: against other requests straight to the engine, and request by request, from the client's first
    token back to what the same request took from the gateway to the engine's first token."""
    firsts = [first_ms(stream) for stream in through]
    added = statistics.median(firsts) - statistics.median(direct)
    lost = sum(not stream.finished for stream in through)
    same = statistics.mean(firsts) - own_ms
    return [
        Row(
            f"TTFT p50, {STREAMS} streams, {PROMPT_TOKENS} prompt tokens",
            statistics.median(firsts),
            "ms",
            statistics.median(direct),
            "the engine's own",
        ),
        below(f"  added by the gateway, p50 of {len(firsts)}", added, "ms", ADDED_TTFT_MS),
        below("  around the engine's first token of the same requests, mean", same, "ms", ADDED_TTFT_MS),
        Row("  p99", p99(firsts), "ms", p99(direct), "the engine's own"),
        below("  streams lost", lost, "", 0),
    ]


async def _many_rows(admin: Admin, port: int, full: bool) -> list[Row]:
    """Many streams at once for a minute; the other node notes every gap between this one's heartbeats."""
    seconds = 120 if full else 60
    load = workload(num_requests=MANY, concurrency=MANY, output_tokens=64 if not full else 128, seed=99)
    began_s = time.monotonic()
    done: list[Stream] = []
    rounds = 0
    while time.monotonic() - began_s < seconds:
        done += await by_http(port, replace(load, requests=load.requests))
        rounds += 1
        _say(f"{MANY} streams, round {rounds}: {time.monotonic() - began_s:.0f} s")
    gap_ms = max(member.gap_ms for member in (await admin.status()).members)
    lost = sum(not stream.finished for stream in done)
    short = sum(stream.finished and not stream.times_s for stream in done)
    elapsed_s = time.monotonic() - began_s
    num_events = sum(len(stream.times_s) for stream in done)
    return [
        below(f"{MANY} streams at once, {len(done)} in {elapsed_s:.0f} s: lost or empty", lost + short, "", 0),
        Row("  events", num_events / elapsed_s, "/s"),
        Row("  gap between two events, p50", statistics.median(gaps_ms(done)), "ms"),
        Row("  gap between two events, p99", p99(gaps_ms(done)), "ms"),
        below("  gap between a daemon's heartbeats meanwhile, p99", gap_ms, "ms", HEARTBEAT_GAP_MS),
    ]


async def _http_port(admin: Admin) -> int:
    status = await admin.status()
    return next(member.node.http_port for member in status.members if member.self)


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure and print one table."""
    rows = asyncio.run(http_rows("--full" in sys.argv))
    print_rows("gateway", rows)
    sys.exit(any(row.met is False for row in rows))


if __name__ == "__main__":
    main()
