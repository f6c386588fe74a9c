"""Failures: how soon nodes see them, how long clients wait, what watching costs, and that no live node counts as dead.

Run as ``scripts/bench faults [--full] [PART ...]``; parts: ``killed engines drained silent heal worst smollm load cost
soak``. Without a name the last three are left out, which take minutes each; ``--full`` runs all, with ten minutes of
load for false deaths, half an hour of faults for leaks, and every fault more often. ``heal`` is in ``time_to_heal.py``,
``worst`` in ``one_users_worst.py``.

Real nodes on loopback; where root and /dev/net/tun are, also on a LAN of network namespaces. Every streamed token is
checked; a wrong one ends the bench.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
from figures import Row, at_least, at_most, below, print_rows
from one_users_worst import worst
from time_to_heal import healed

from edgepipe.cluster.absence import missed
from edgepipe.errors import EdgepipeError
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import ClusterStatus
from tests.support.faults.chaos.cluster import ChaosCluster, chaos_cluster
from tests.support.faults.chaos.run import ChaosRun
from tests.support.network.lan import LanLab, lan_available
from tests.support.processes.nodes import Node, Nodes, children_of

LOOK_S = 0.004
_SOAK_FAULTS = ("kill stage", "crash stage", "kill two stages", "blink node", "kill engine")
_FIRST_FAULTS = 120
_SETTLING_S = 360.0
_LONG_PARTS = ("load", "cost", "soak")
_LAN_PARTS = ("silent", "load")
MODELS = Path(os.environ.get("EP_TEST_MODELS", "~/.cache/edgepipe-tests")).expanduser()


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def progress(text: str) -> None:
    """What runs now; on standard error, so that the table stays alone."""
    print(f"  {text}", file=sys.stderr, flush=True)


@asynccontextmanager
async def folder() -> AsyncIterator[Path]:
    """A new folder, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="edgepipe-faults-") as name:
        yield Path(name)


async def until(node: Node, wanted: Callable[[ClusterStatus], bool], *, limit_s: float) -> float:
    """Seconds until the node's status is as wanted; the limit if it never is."""
    began = time.perf_counter()
    async with node.admin() as admin:
        while (passed := time.perf_counter() - began) < limit_s:
            if wanted(await admin.status()):
                return passed
            await asyncio.sleep(LOOK_S)
    return limit_s


def epochs(status: ClusterStatus) -> list[int]:
    """Counters of what is served."""
    return [engine.epoch.counter for engine in status.engines]


async def stalls_of(
    cluster: ChaosCluster,
    fault: str,
    *,
    times: int,
    seed: int,
    exact: bool = True,
    max_tokens: int = 0,
    strike_at: float | None = None,
) -> list[float]:
    """The longest pause of every stream that the fault met, over so many trials."""
    run = ChaosRun(cluster, seed=seed, exact=exact, max_tokens=max_tokens or (160 if exact else 60))
    await run.prepare(num_requests=4)
    stalls: list[float] = []
    for _ in range(times):
        stalls += (await run.trial(fault, num_streams=2, most_pause_s=60.0, strike_at=strike_at)).stalls_s
    return stalls


async def killed(times: int, rows: list[Row]) -> None:
    """A stage process is killed: when another node knows, when the client reads on."""
    async with folder() as place, chaos_cluster(place) as cluster:
        progress("stage processes killed in mid-answer")
        stalls = await stalls_of(cluster, "kill stage", times=times, seed=1)
        rows.append(below("stall, killed stage, p50", statistics.median(stalls), "s", 2.0))
        rows.append(below("stall, killed stage, p99", percentile(stalls, 0.99), "s", 4.0))
        (engine,) = (await cluster.until_ready()).engines
        rows.append(Row("tokens of interrupted answers kept in the KV", engine.kept_tokens, ""))
        rows.append(Row("tokens replayed up to the stage that was killed", engine.replayed_tokens, ""))
        progress("stage processes killed, and who knows when")
        reported, spread = zip(*[await _seen_killed(cluster) for _ in range(times)], strict=True)
        rows.append(below("reported by its daemon, killed stage, p99", percentile(reported, 0.99), "s", 0.1))
        rows.append(Row("seen on another node, killed stage, p99", percentile(spread, 0.99), "s"))
        progress("stage processes stopped")
        stalls = await stalls_of(cluster, "stop stage", times=2, seed=2)
        rows.append(below("stall, hung stage (deadline 5 s), worst", max(stalls), "s", 5.0 + 4.0))


async def _seen_killed(cluster: ChaosCluster) -> tuple[float, float]:
    """Seconds from a stage's SIGKILL until its daemon knows, and until another node knows that it is recovered from."""
    before = epochs(await cluster.until_ready())
    name, pid = (await cluster.children("stage"))[-1]

    def gone(status: ClusterStatus) -> bool:
        return all(child.pid != pid for child in status.children)

    def recovering(status: ClusterStatus) -> bool:
        return epochs(status) != before or any(engine.state == "recovering" for engine in status.engines)

    looking = [
        asyncio.create_task(until(node, wanted, limit_s=5.0))
        for node, wanted in ((cluster.running[name], gone), (cluster.first, recovering))
    ]
    await asyncio.sleep(0.1)  # the looks have begun
    head_start_s = 0.1
    psutil.Process(pid).kill()
    taken = await asyncio.gather(*looking)
    return max(0.0, taken[0] - head_start_s), max(0.0, taken[1] - head_start_s)


async def killed_engines(times: int, rows: list[Row]) -> None:
    """The engine's process is killed; a fourth time within a minute it would stay down."""
    async with folder() as place, chaos_cluster(place) as cluster:
        progress("engines killed in mid-answer")
        stalls = await stalls_of(cluster, "kill engine", times=times, seed=3)
        rows.append(below("stall, killed engine, p99", percentile(stalls, 0.99), "s", 4.0))


async def drained(times: int, rows: list[Row]) -> None:
    """A node is drained, that of a stage and that of the engine: what clients notice of it."""
    async with folder() as place, chaos_cluster(place) as cluster:
        for fault, what in (("drain node", "a stage's node"), ("drain engine", "the engine's node")):
            progress(f"{what} is drained in mid-answer")
            stalls = await stalls_of(cluster, fault, times=times, seed=7, max_tokens=1200, strike_at=0.05)
            rows.append(below(f"pause, {what} drained, p50", statistics.median(stalls), "s", 1.0))
            rows.append(below(f"pause, {what} drained, worst", max(stalls), "s", 1.0))


async def silent(times: int, rows: list[Row]) -> None:
    """A node's cable is pulled: when the others know, when the client reads on."""
    async with folder() as place, LanLab(hosts=3) as lab:
        lab.shape(delay_s=0.0005)
        async with chaos_cluster(place, lab=lab, plan="b:0-2,c:3-5") as cluster:
            progress("cables pulled in mid-answer")
            stalls = await stalls_of(cluster, "cut node", times=times, seed=4)
            rows.append(below("stall, silent node, p50", statistics.median(stalls), "s", 4.0))
            rows.append(below("stall, silent node, p99", percentile(stalls, 0.99), "s", 6.0))
            progress("cables pulled, seen from another node")
            seen: list[float] = []
            for _ in range(times):
                await cluster.until_ready()
                lab.cut("c")
                seen.append(await until(cluster.first, lambda status: bool(missed(status.absent)), limit_s=10.0))
                lab.heal("c")
            rows.append(below("seen, silent node, p99", percentile(seen, 0.99), "s", 2.5))


async def smollm(times: int, rows: list[Row]) -> None:
    """A real model, its shards on every disk."""
    async with folder() as place:
        flags = {"backend": "torch", "backend_options": None, "threads": 1, "models_dir": str(MODELS), "link": None}
        async with chaos_cluster(place, model="demo", plan="b:0-14,c:15-29", **flags) as cluster:
            progress("SmolLM2, stage processes killed in mid-answer")
            stalls = await stalls_of(cluster, "kill stage", times=times, seed=5, exact=False)
            rows.append(below("stall, SmolLM2, killed stage, p99", percentile(stalls, 0.99), "s", 8.0))


async def buried_alive(seconds: float, rows: list[Row]) -> None:
    """Full load, 5 % loss, up to 500 ms of jitter: does anybody take a living node for dead?"""
    async with folder() as place, LanLab(hosts=3) as lab:
        nodes = Nodes(folder=place, cluster="faults-load")
        try:
            started = await asyncio.gather(*(nodes.start(host.name, host=host, backend="none") for host in lab.hosts))
            for node in started:
                await node.until(lambda status: len(status.members) == 3)
            busy = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(os.cpu_count() or 1)]
            for process in busy:
                process.start()
            lab.shape(loss=0.05, jitter_s=0.5)
            progress(f"full load, 5 % loss, 500 ms jitter: 30 s to get to know the links, then {seconds:.0f} s")
            await asyncio.sleep(30.0)
            deaths = await _deaths(started, seconds)
            for process in busy:
                process.kill()
            rows.append(below(f"living nodes taken for dead in {seconds:.0f} s of load and bad links", deaths, "", 0))
        finally:
            await nodes.end()


async def _deaths(nodes: Sequence[Node], seconds: float) -> int:
    """How often a node began to miss another."""
    until_s, deaths = time.monotonic() + seconds, 0
    known: dict[str, set[str]] = {node.node_id: set() for node in nodes}
    while time.monotonic() < until_s:
        for node in nodes:
            with contextlib.suppress(TimeoutError):
                now = {one.name for one in missed((await node.status()).absent)}
                deaths += len(now - known[node.node_id])
                known[node.node_id] = now
        await asyncio.sleep(0.25)
    return deaths


def _spin() -> None:
    while True:
        pass


async def cost(rounds: int, rows: list[Row]) -> None:
    """Tokens per second as it is, and with heartbeats, progress reports, hang watch and keepalive all but off."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    costs: dict[bool, list[float]] = {True: [], False: []}
    async with folder() as place:
        async with (
            chaos_cluster(place / "safe", names=("a", "b"), plan="a:0-2,b:3-5", link=None) as safe,
            _without_safety(place / "unsafe") as unsafe,
        ):
            for index in range(2 * rounds):
                progress(f"tokens per second with and without watching, {index + 1} of {2 * rounds}")
                is_safe = bool(index % 2) ^ bool(index // 2 % 2)
                rate, cpu_ms = await _tokens_per_s(safe if is_safe else unsafe)
                rates[is_safe].append(rate)
                costs[is_safe].append(cpu_ms)
    rate, without = statistics.median(rates[True]), statistics.median(rates[False])
    rows.append(at_least("tokens/s with all watching on, emulated, 8 streams", rate, "tok/s", without, "all off", 0.97))
    cpu_ms, cpu_without_ms = statistics.median(costs[True]), statistics.median(costs[False])
    rows.append(at_most("CPU of all processes, all watching on", cpu_ms, "ms/token", cpu_without_ms, "all off", 1.03))
    for name, values in (("on", rates[True]), ("off", rates[False])):
        spread = (max(values) - min(values)) / statistics.median(values)
        rows.append(Row(f"spread of the runs with it {name}", 100 * spread, "%"))


@asynccontextmanager
async def _without_safety(place: Path) -> AsyncIterator[ChaosCluster]:
    main = (str(Path(__file__).with_name("unwatched.py")),)
    async with chaos_cluster(place, names=("a", "b"), plan="a:0-2,b:3-5", link=None, main=main) as cluster:
        yield cluster


async def _tokens_per_s(cluster: ChaosCluster, *, streams: int = 8, max_tokens: int = 400) -> tuple[float, float]:
    """Tokens per second, and milliseconds of CPU per token, which other programs' load disturbs less."""
    body = {"model": "tiny", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    url = f"http://127.0.0.1:{cluster.http_port}/v1/completions"
    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
        for size in (10, max_tokens):  # the first is for getting warm
            began, spent_s = time.perf_counter(), _cpu_s(cluster)
            asking = [http.post(url, json={**body, "prompt": [7, n], "max_tokens": size}) for n in range(streams)]
            for response in await asyncio.gather(*asking):
                response.raise_for_status()
    num_tokens = streams * max_tokens
    return num_tokens / (time.perf_counter() - began), 1e3 * (_cpu_s(cluster) - spent_s) / num_tokens


def _cpu_s(cluster: ChaosCluster) -> float:
    """Seconds of CPU that the cluster's processes have taken."""
    total = 0.0
    for node in cluster.running.values():
        for process in (psutil.Process(node.process.pid), *children_of(node.process.pid)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def soak(seconds: float, rows: list[Row], *, every_s: float = 20.0) -> None:
    """A fault every 20 s: does anything grow, once histories, caches and arenas are full?

    They are after 120 faults in a row (each some lines of the log, of which 2000 are kept), a first search for a better
    placement (its code alone takes 2.5 MB), and six minutes at the soak's own pace: daemons keep the gaps of two
    minutes' beats.
    """
    draw = random.Random(6)
    samples: list[_Sample] = []
    async with folder() as place, chaos_cluster(place) as cluster:
        run = ChaosRun(cluster, seed=6)
        await run.prepare()
        for number in range(_FIRST_FAULTS):
            progress(f"soak: fault {number + 1} of {_FIRST_FAULTS} before it")
            await run.trial(draw.choice(_SOAK_FAULTS[:-1]))  # an engine that is killed every other second is given up
        await cluster.first.serve(cluster.model, rebalance=True, options=ServeSpec(model=cluster.model, num_nodes=2))
        began = time.monotonic() + _SETTLING_S
        while (passed := time.monotonic() - began) < seconds:
            fault = draw.choice(_SOAK_FAULTS)
            await run.trial(fault)
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began - passed)))
            sample = await _sample(cluster, time.monotonic() - began)
            progress(
                f"soak: {sample.at_s:.0f} of {seconds:.0f} s, {fault}, "
                f"{sample.size_bytes / 2**20:.1f} MB, {sample.descriptors} descriptors, {sample.tasks} tasks"
            )
            if sample.at_s > 0:
                samples.append(sample)
    hours = [sample.at_s / 3600 for sample in samples]
    sizes = [sample.size_bytes for sample in samples]
    slope = statistics.linear_regression(hours, sizes).slope / statistics.mean(sizes) * 100
    rows.append(below(f"memory slope of daemons over {seconds / 60:.0f} min", slope, "%/h", 1.0))
    rows.append(Row("  of all", sizes[-1] / 2**20, "MB", sizes[0] / 2**20, "at first", sizes[-1] / sizes[0]))
    rows.append(below("descriptors gained", _gained([sample.descriptors for sample in samples]), "", 8))
    rows.append(below("tasks gained", _gained([sample.tasks for sample in samples]), "", 8))
    rows.append(Row("faults in the soak", len(samples), ""))


class _Sample(NamedTuple):
    """What the daemons hold, which live on while stages and engines come and go."""

    at_s: float
    size_bytes: int
    descriptors: int
    tasks: int


async def _sample(cluster: ChaosCluster, at_s: float) -> _Sample:
    nodes = list(cluster.running.values())
    processes = [psutil.Process(node.process.pid) for node in nodes]
    return _Sample(
        at_s,
        sum(one.memory_info().rss for one in processes),
        sum(one.num_fds() for one in processes),
        sum([(await node.status()).num_tasks for node in nodes]),
    )


def _gained(counts: Sequence[int]) -> float:
    """Return the growth from the first ten counts to the last ten: a count may be taken while something goes on."""
    return statistics.median(counts[-10:]) - statistics.median(counts[:10])


async def main() -> None:
    """Every figure, then the tables. A part that fails is reported in its place, and the others go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows: list[Row] = []
    heal_rows: list[Row] = []
    parts = _parts(rows, heal_rows)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--full", action="store_true", help="all parts, ten minutes of load, half an hour of faults")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    lan = lan_available()
    for name in options.parts or [name for name in parts if options.full or name not in _LONG_PARTS]:
        if name in _LAN_PARTS and not lan:
            progress(f"left out: {name}: {lan.reason}")
            continue
        try:
            await parts[name](options.full)
        except (EdgepipeError, AssertionError, TimeoutError, psutil.Error, httpx.HTTPError, OSError) as error:
            progress(f"{name} failed: {str(error)[:2000]}")
            rows.append(Row(f"{name}: failed, see above", 1, "", target="0", met=False))
    if heal_rows:
        print_rows("time to heal", heal_rows)
    if rows:
        print_rows("faults", rows)


def _parts(rows: list[Row], heal_rows: list[Row]) -> dict[str, Callable[[bool], Awaitable[None]]]:
    """Every part by name; the argument says whether in full. Parts append to the rows; ``worst`` prints its table."""

    async def heal(full: bool) -> None:
        heal_rows.extend(await healed(full))

    return {
        "killed": lambda full: killed(12 if full else 5, rows),
        "engines": lambda full: killed_engines(3, rows),
        "drained": lambda full: drained(4 if full else 1, rows),
        "silent": lambda full: silent(6 if full else 3, rows),
        "heal": heal,
        "worst": worst,
        "smollm": lambda full: smollm(4 if full else 2, rows),
        "load": lambda full: buried_alive(600.0 if full else 60.0, rows),
        "cost": lambda full: cost(6, rows),
        "soak": lambda full: soak(1800.0, rows),
    }


if __name__ == "__main__":
    asyncio.run(main())
