"""Batches: what an interactive chat notices of one, what it costs the batch, and the memory of a large one.

Run as ``scripts/bench batch [chat|large] [LINES]``. Needs no GPU: nodes, engine and gateway are real processes, only
the devices' arithmetic is emulated. ``scripts/bench batch replicas`` simulates what ``--replicas auto`` chooses.

Predictions, written before the first run:

- ITL p50 of a chat beside a batch over alone: 1.2 to 1.5. A step with 200 rows takes little longer than one with a
  single row, as long as weights bound it.
- The batch keeps 0.8 or more of its speed: one chat takes one row of some 200.
- Memory of the gateway grows by less than 100 MB, whatever the number of lines.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx
import psutil
from batch_replicas import replica_rows
from figures import Row, at_least, at_most, below, print_rows

from edgepipe.cli.admin import Admin
from edgepipe.cli.bench.cluster import EmulatedCluster, emulated_cluster
from edgepipe.cli.bench.run import serve_model
from edgepipe.shapes.loader import named_shape
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import ServeRequest

SHAPE, MIX = "qwen2.5-14b", "q4_k_m"
MODEL = f"{SHAPE}-{MIX}"
ITL_GOAL_S = 0.1
CHATS, CHAT_TOKENS = 4, 128
BATCH_LINES = 10_000
MEASURED_S = 20.0
WARM_S = 10.0
MOST_ITL, LEAST_SPEED = 1.5, 0.3
MOST_GROWTH_MB = 100.0


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def batch_file(num_lines: int, *, prompt_bytes: int, max_tokens: int) -> bytes:
    """Return lines with prompts of about this size and answers of exactly ``max_tokens``."""
    rng = random.Random(1)
    lines: list[str] = []
    for number in range(num_lines):
        text = f"{number}: " + "".join(rng.choices("abcdefgh ", k=prompt_bytes))
        body = {"model": MODEL, "prompt": text, "max_tokens": max_tokens, "ignore_eos": True}
        line = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line) + "\n")
    return "".join(lines).encode()


async def begin(http: httpx.AsyncClient, data: bytes) -> str:
    """Upload a file and run it. Return the batch's id."""
    file = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})
    file.raise_for_status()
    body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = await http.post("/v1/batches", json=body)
    answer.raise_for_status()
    return answer.json()["id"]


async def completed(http: httpx.AsyncClient, batch_id: str) -> None:
    """Return once the batch has ended well."""
    while True:
        if (await http.get(f"/v1/batches/{batch_id}")).json()["status"] == "completed":
            return
        await asyncio.sleep(0.2)


async def tokens_so_far(http: httpx.AsyncClient) -> float:
    """Return the tokens that the gateway has generated."""
    text = (await http.get("/metrics")).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("edgepipe_generation_tokens_total{")
    )


async def speed(http: httpx.AsyncClient, seconds: float) -> float:
    """Return generated tokens per second over a while."""
    began_s, before = time.monotonic(), await tokens_so_far(http)
    await asyncio.sleep(seconds)
    return (await tokens_so_far(http) - before) / (time.monotonic() - began_s)


async def chat(
    http: httpx.AsyncClient, number: int, until: asyncio.Task[float] | None = None
) -> tuple[list[float], list[float]]:
    """Return a chat's time to its first token, and the times between its tokens (s). It leaves when ``until`` ends."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"chat {number}: tell me a story"}]}
    more = {"max_tokens": CHAT_TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    began_s, times_s = time.monotonic(), list[float]()
    async with http.stream("POST", "/v1/chat/completions", json=body | more) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if until is not None and until.done():
                break
            if not line.startswith("data: {"):
                continue
            choices: list[dict[str, Any]] = json.loads(line.removeprefix("data: "))["choices"]
            times_s += [time.monotonic() for choice in choices for _ in choice.get("token_ids") or ()]
    first_s = [times_s[0] - began_s] if times_s else []
    return first_s, [later - earlier for earlier, later in itertools.pairwise(times_s)]


async def chats_beside(http: httpx.AsyncClient, until: asyncio.Task[float]) -> tuple[list[float], list[float]]:
    """Return the times to the first tokens, and all times between tokens, of chats one after another."""
    firsts, gaps = list[float](), list[float]()
    while not until.done():
        first_s, between_s = await chat(http, 100 + len(firsts), until)
        firsts += first_s
        gaps += between_s
    return firsts, gaps


def p99(values: Sequence[float]) -> float:
    """Return the value that 99 % do not exceed."""
    return sorted(values)[int(len(values) * 0.99)]


async def chat_rows(admin: Admin, port: int) -> list[Row]:
    """Measure chats alone, a batch alone, and both together."""
    await serve_model(admin, ServeRequest(options=ServeSpec(model=MODEL, num_nodes=2)))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120) as http:
        await chat(http, 0)
        alone_first, alone_gaps = list[float](), list[float]()
        for number in range(1, 1 + CHATS):
            first_s, between_s = await chat(http, number)
            alone_first += first_s
            alone_gaps += between_s
        say(f"chats alone: {statistics.median(alone_gaps) * 1e3:.1f} ms between tokens")
        batch_id = await begin(http, batch_file(BATCH_LINES, prompt_bytes=100, max_tokens=64))
        await asyncio.sleep(WARM_S)
        batch_alone = await speed(http, MEASURED_S)
        say(f"batch alone: {batch_alone:.0f} tok/s")
        began_s = time.monotonic()
        both = asyncio.create_task(speed(http, MEASURED_S))
        first, gaps = await chats_beside(http, both)
        batch_beside = await both - (len(gaps) + len(first)) / (time.monotonic() - began_s)
        say(f"together: {statistics.median(gaps) * 1e3:.1f} ms between tokens, batch {batch_beside:.0f} tok/s")
        await http.post(f"/v1/batches/{batch_id}/cancel")
    turn_s = statistics.median(gaps)
    return [
        at_most(
            "ITL p50 of a chat beside a batch",
            turn_s * 1e3,
            "ms",
            statistics.median(alone_gaps) * 1e3,
            "alone",
            MOST_ITL,
        ),
        below(
            "ITL p99 of a chat beside a batch", p99(gaps) * 1e3, "ms", round((p99(alone_gaps) + ITL_GOAL_S) * 1e3, 1)
        ),
        below(
            "TTFT p50 of a chat beside a batch",
            statistics.median(first) * 1e3,
            "ms",
            round((statistics.median(alone_first) + turn_s) * 1e3, 1),
        ),
        at_least("speed of the batch beside a chat", batch_beside, "tok/s", batch_alone, "alone", LEAST_SPEED),
    ]


async def large_rows(admin: Admin, port: int, num_lines: int) -> list[Row]:
    """Run a large batch of short lines; return memory and descriptors of the gateway."""
    await serve_model(admin, ServeRequest(options=ServeSpec(model=MODEL, num_nodes=2)))
    status = await admin.status()
    gateway = psutil.Process(next(child.pid for child in status.children if child.kind == "gateway"))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=600) as http:
        small = await begin(http, batch_file(500, prompt_bytes=40, max_tokens=2))
        await completed(http, small)
        data = batch_file(num_lines, prompt_bytes=40, max_tokens=2)
        before = gateway.memory_info().rss
        began_s, most, descriptors = time.monotonic(), before, 0
        batch_id = await begin(http, data)
        checked_s = 0.0
        while True:
            batch = (await http.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] != "validating":
                checked_s = checked_s or time.monotonic() - began_s
            family = [gateway, *gateway.children()]
            most = max(most, sum(_rss(process) for process in family))
            descriptors = max(descriptors, gateway.num_fds())
            if batch["status"] in ("completed", "failed"):
                break
            await asyncio.sleep(0.5)
        taken_s = time.monotonic() - began_s
    counts = batch["request_counts"]
    assert counts["completed"] == num_lines, batch
    return [
        below(
            f"memory beyond the idle gateway's, its children included: {num_lines:,} lines",
            (most - before) / 1e6,
            "MB",
            MOST_GROWTH_MB,
        ),
        Row("descriptors of the gateway, most", descriptors, ""),
        Row("time of the check of the input, upload included", checked_s, "s"),
        Row("lines per second, two tokens each", num_lines / taken_s, "lines/s"),
    ]


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


async def measure(part: str, num_lines: int) -> list[Row]:
    """Start a cluster for one part of the table."""
    settings = {} if part == "chat" else {"time_factor": "0"}
    cluster = EmulatedCluster(
        devices=["rtx4090", "rtx4090"],
        model=f"{SHAPE}:{MIX}",
        mix=MIX,
        config=named_shape(SHAPE),
        link="1gbit,0.3ms",
        settings=settings,
    )
    async with emulated_cluster(cluster) as admin:
        status = await admin.status()
        port = next(member.node.http_port for member in status.members if member.self)
        return await (chat_rows(admin, port) if part == "chat" else large_rows(admin, port, num_lines))


def main() -> None:
    """Measure and print one table."""
    words = sys.argv[1:]
    if words == ["replicas"]:
        rows = replica_rows()
        print_rows("batch, replicas", rows)
        sys.exit(any(row.met is False for row in rows))
    num_lines = next((int(word) for word in words if word.isdigit()), 20_000)
    parts = [word for word in words if word in ("chat", "large")] or ["chat", "large"]
    rows = [row for part in parts for row in asyncio.run(measure(part, num_lines))]
    print_rows("batch", rows)
    sys.exit(any(row.met is False for row in rows))


if __name__ == "__main__":
    main()
