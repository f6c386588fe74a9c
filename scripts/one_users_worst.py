"""Part ``worst`` of ``scripts/bench faults``: what one user's hostile but valid requests do to another user.

Two emulated nodes on loopback with 5 ms a hop. The bystander streams two chats all the time, one of them bound to a
small schema that is new each time; the hostile user, a process of low priority with a key of its own, sends one case
after another. Before each case the bystander is measured alone. A case that leaves the cluster unable to answer within
15 s is followed by a new cluster.

Predictions: the bars, for every case: longest wait <= 1 s, 99th percentile of the gaps between tokens <= 3 times that
of the same bystander alone, no epoch ended, no wrong token, gateway <= 600 MiB. The answers that the hostile user
should get are in the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import ROOT, Row, at_most, below, print_lines

from tests.support.faults.hostile.bystander import Waits
from tests.support.faults.hostile.cases import HOSTILE_CASES, HostileCase
from tests.support.faults.hostile.cluster import HOSTILE_KEY, SharedCluster, memory_bytes, shared_cluster

_ALONE_S = 3.0
_CALM_S = 15.0
_LONGEST_S, _RATIO, _GATEWAY_MIB = 1.0, 3.0, 600.0
_SUMMARY_S = 10.0
_LOOK_S = 0.2
_COLUMNS = (
    "case",
    "gap p50, ms",
    "p99, ms",
    "ratio",
    "longest wait, s",
    "answers",
    "predicted",
    "epochs",
    "gateway, MiB",
    "all, MiB",
    "",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case, once."""

    case: HostileCase
    alone: Waits
    beside: Waits
    answers: dict[str, int]  # answers to the hostile user, by status
    complaints: list[str]
    epochs_ended: int
    gateway_mib: float  # peak
    grown_mib: float  # growth of all processes together
    calm: bool  # whether the bystander is served again after it


async def worst(full: bool) -> None:
    """Measure every case, in full three times, and print the table, also if a later case cannot be measured."""
    measured: list[Measured] = []
    try:
        await _measure([case for case in HOSTILE_CASES for _ in range(3 if full else case.times)], measured)
    finally:
        by_case = [[one for one in measured if one.case is case] for case in HOSTILE_CASES]
        found = [same for same in by_case if same]
        rows = [row for same in found for row in _rows(same)]
        print_lines("one user's worst", _COLUMNS, [_line(same) for same in found], rows)


async def _measure(waiting: list[HostileCase], measured: list[Measured]) -> None:
    """Measure one case after another, in a new cluster after each that left the old one unable to answer."""
    while waiting:
        with tempfile.TemporaryDirectory(prefix="edgepipe-worst-") as place:
            async with shared_cluster(Path(place)) as cluster, cluster.bystander.asking():
                calm = True
                while waiting and calm:
                    measured.append(await _measured(cluster, waiting.pop(0)))
                    calm = measured[-1].calm
                    _say(measured[-1])


async def _measured(cluster: SharedCluster, case: HostileCase) -> Measured:
    with cluster.bystander.span() as alone:
        await asyncio.sleep(_ALONE_S)
    epoch, gateway, pids = await cluster.epoch(), await cluster.gateway_pid(), cluster.pids()
    before = sum(memory_bytes(pids))
    async with _hostile(cluster.nodes.http_port, case) as process:
        with cluster.bystander.span() as beside:
            peaks = await _peaks(process, gateway, pids, seconds=case.seconds + 1.0)
            said = await _said(process)
    calm = await _calm(cluster)
    return Measured(
        case=case,
        alone=alone,
        beside=beside,
        answers=said["statuses"],
        complaints=said["complaints"],
        epochs_ended=await cluster.epoch() - epoch,
        gateway_mib=peaks[0] / 2**20,
        grown_mib=(peaks[1] - before) / 2**20,
        calm=calm,
    )


@asynccontextmanager
async def _hostile(port: int, case: HostileCase) -> AsyncIterator[asyncio.subprocess.Process]:
    """The hostile user's process, ready to ask."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-P", "-m", "tests.support.faults.hostile", str(port), HOSTILE_KEY, case.name)
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 26, cwd=ROOT)
    assert process.stdout is not None
    await process.stdout.readline()
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _peaks(process: asyncio.subprocess.Process, gateway: int, pids: list[int], *, seconds: float) -> list[int]:
    """Let the case run to its end; the most bytes that the gateway and all processes together had meanwhile."""
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    peaks = [0, 0]
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        found = [sum(memory_bytes(some)) for some in ([gateway], pids)]
        peaks = [max(pair) for pair in zip(peaks, found, strict=True)]
        if process.returncode is not None:
            break
        await asyncio.sleep(_LOOK_S)
    return peaks


async def _said(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The hostile user's summary; empty if its process was too busy to give one."""
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError, ValueError):
        async with asyncio.timeout(_SUMMARY_S):
            return json.loads(await process.stdout.readline())
    return {"statuses": {"no summary": 1}, "complaints": []}


async def _calm(cluster: SharedCluster) -> bool:
    """Whether the bystander's chats are answered again soon."""
    try:
        async with asyncio.timeout(_CALM_S):
            await cluster.bystander.answered(2)
    except TimeoutError:
        return False
    return True


def _p99(values: Sequence[float]) -> float:
    """The value that one in a hundred exceeds; infinite without values."""
    return sorted(values)[len(values) * 99 // 100] if values else math.inf


def _rows(same: Sequence[Measured]) -> list[Row]:
    """The bars of one case, each on the worst of its runs."""
    name = same[0].case.name
    longest = [one.beside.longest_s for one in same]
    spread = f" ({min(longest):.2f} to {max(longest):.2f})" if len(same) > 1 else ""
    p99s = [[_p99(waits.gaps_s) * 1e3 for waits in (one.alone, one.beside)] for one in same]
    alone_ms, beside_ms = max(p99s, key=lambda pair: pair[1] / pair[0])
    return [
        below(f"{name}: longest wait{spread}", max(longest), "s", _LONGEST_S),
        at_most(f"{name}: gap p99", beside_ms, "ms", alone_ms, "alone", _RATIO),
        below(f"{name}: gateway, peak", max(one.gateway_mib for one in same), "MiB", _GATEWAY_MIB),
        below(f"{name}: epochs ended", sum(one.epochs_ended for one in same), "", 0),
        below(f"{name}: wrong answers", sum(len(one.beside.wrong) for one in same), "", 0),
        below(f"{name}: answers without status, reason or field", sum(len(one.complaints) for one in same), "", 0),
    ]


def _line(same: Sequence[Measured]) -> list[str]:
    """One case of the table: its worst run."""
    one = max(same, key=lambda each: each.beside.longest_s)
    alone, beside = one.alone, one.beside
    p50 = [statistics.median(waits.gaps_s) if waits.gaps_s else math.inf for waits in (alone, beside)]
    p99 = [_p99(alone.gaps_s), _p99(beside.gaps_s)]
    return [
        f"{one.case.name}: {one.case.what}",
        f"{p50[0] * 1e3:.0f} -> {p50[1] * 1e3:.0f}",
        f"{p99[0] * 1e3:.0f} -> {p99[1] * 1e3:.0f}",
        f"{p99[1] / p99[0]:.1f}x",
        f"{alone.longest_s:.2f} -> {beside.longest_s:.2f}{' and on' * beside.cut_off}",
        ", ".join(f"{count}x {status}" for status, count in sorted(one.answers.items())),
        one.case.answers,
        str(one.epochs_ended),
        f"{one.gateway_mib:.0f}",
        f"+{one.grown_mib:.0f}",
        "met" if all(row.met for row in _rows(same)) else "MISSED",
    ]


def _say(one: Measured) -> None:
    """The case as it comes, and what is wrong with answers, on standard error."""
    print(f"  {' | '.join(_line([one]))}", file=sys.stderr, flush=True)
    refused = ", ".join(f"{count}x {status}" for status, count in one.beside.refused.items())
    for text in (*one.complaints[:3], *one.beside.wrong[:1], *([f"the bystander got {refused}"] if refused else [])):
        print(f"    {text[:300]}", file=sys.stderr, flush=True)
