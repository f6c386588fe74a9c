"""What two machines and one model cost: against transformers, against one stage, and in time and memory.

Run as ``scripts/bench foundation``. Parts can be named to run alone: ``backend stages link memory discovery``.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import psutil
from figures import Row, at_least, at_most, below
from local_nodes import Node, complete, decode_rate, median_gap_s, running_nodes, settle
from parts import Part, run_parts

from edgepipe.errors import EdgepipeError
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.spec.layout import slice_parameters
from edgepipe.store.store import ModelStore, StoredModel

ROUNDS = 3
HALVES = "n0:0-14,n1:15-29"
PROMPTS = [[(7 * i + 13 * j) % 40_000 + 100 for j in range(24)] for i in range(16)]
STAGE_ALLOWANCE_BYTES = 600_000_000  # interpreter, libraries, activations
OTHER_LIMIT_MB = 250.0


def stored_demo() -> StoredModel:
    """The demo model: of EP_TEST_MODELS, else fetched on the first run."""
    store = ModelStore(Path(os.environ.get("EP_TEST_MODELS") or Path.home() / ".cache" / "edgepipe-bench"))
    try:
        return store.resolve("demo")
    except EdgepipeError:
        print("fetching the demo model", file=sys.stderr)
        store.pull("demo")
        return store.resolve("demo")


def stage_rows(model: StoredModel) -> list[Row]:
    """Two stages of one thread each against one stage of one thread: latency of one, throughput of sixteen."""
    models_dir = model.path.parent
    with (
        running_nodes(1, models_dir=models_dir, threads=1) as one,
        running_nodes(2, models_dir=models_dir, threads=1) as two,
    ):
        one[0].edgepipe("serve", "demo", "--micro-batches", "1", "--context", "1024", "--draft", "off")
        two[0].edgepipe(
            "serve", "demo", "--plan", HALVES, "--micro-batches", "1", "--context", "1024", "--draft", "off"
        )
        alone_ms, one_gap, two_gap = _latencies(one[0], two[0])
        one_rate = statistics.median(_rate(one[0], 16) for _ in range(ROUNDS))
        two[0].edgepipe("stop", "demo")
        two[0].edgepipe(
            "serve", "demo", "--plan", HALVES, "--micro-batches", "2", "--context", "1024", "--draft", "off"
        )
        complete(two[0], PROMPTS[:1], max_tokens=8)
        settle()
        two_rate = statistics.median(_rate(two[0], 16) for _ in range(ROUNDS))
    allowed = 8 / (max(alone_ms) / 1e3)
    times = " and ".join(f"{ms:.1f}" for ms in alone_ms)
    return [
        at_most("decode, 1 sequence, two stages", two_gap * 1e3, "ms/token", one_gap * 1e3, "one stage", 1.10),
        at_least("decode, 16 sequences, two stages, M=2", two_rate, "tok/s", allowed, f"8 rows in {times} ms", 0.85),
        Row("  gain over one stage", two_rate, "tok/s", one_rate, "one stage, M=1", two_rate / one_rate),
    ]


def _latencies(one: Node, two: Node) -> tuple[list[float], float, float]:
    """Each stage's own time for 8 rows with nothing beside it, and both clusters' time per token, taken in turns."""
    one_gaps: list[float] = []
    two_gaps: list[float] = []
    stage_ms: list[list[float]] = []
    for node in (one, two):
        complete(node, PROMPTS[:1], max_tokens=8)
    settle()
    for _ in range(ROUNDS):
        one_gaps.append(median_gap_s(complete(one, PROMPTS[:1], max_tokens=48)))
        two_gaps.append(median_gap_s(complete(two, PROMPTS[:1], max_tokens=48)))
        complete(two, PROMPTS[:8], max_tokens=32)
        (engine,) = two.status()["engines"]
        stage_ms.append([float(stage["step_ms"]) for stage in engine["stages"]])
    alone = [statistics.median(times) for times in zip(*stage_ms, strict=True)]
    return alone, statistics.median(one_gaps), statistics.median(two_gaps)


def _rate(node: Node, count: int) -> float:
    return decode_rate(complete(node, PROMPTS[:count], max_tokens=48))


def memory_rows(model: StoredModel) -> list[Row]:
    """Resident and peak memory of every process of two nodes that serve and have answered."""
    slices = make_slices([LayerRange(0, 15), LayerRange(15, 30)], model.config.num_layers)
    rows: list[Row] = []
    with running_nodes(2, models_dir=model.path.parent, threads=1) as nodes:
        nodes[0].edgepipe("serve", "demo", "--plan", HALVES, "--context", "1024", "--draft", "off")
        complete(nodes[0], PROMPTS[:8], max_tokens=16)
        (engine,) = nodes[0].status()["engines"]
        for index, node in enumerate(nodes):
            weights = 4 * slice_parameters(model.config, slices[index])
            kv = int(engine["stages"][index]["kv_bytes"])
            largest = 4 * model.config.vocab_size * model.config.hidden_size
            for kind, process in node.processes():
                rows += _memory_of(node, kind, process, weights + kv, largest)
    return rows


def _memory_of(node: Node, kind: str, process: psutil.Process, held: int, largest: int) -> list[Row]:
    now, peak = process.memory_info().rss, _peak_bytes(process.pid)
    if kind != "stage":
        return [below(f"memory, {kind} of {node.name}", now / 1e6, "MB", OTHER_LIMIT_MB)]
    limit = held + STAGE_ALLOWANCE_BYTES
    return [
        below(f"memory, stage of {node.name} ({held / 1e6:.0f} MB tensors and KV)", now / 1e6, "MB", limit // 10**6),
        below(f"memory, stage of {node.name}, peak", peak / 1e6, "MB", (limit + largest) // 10**6),
    ]


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return psutil.Process(pid).memory_info().rss


def main() -> None:
    """Measure the named parts, all unless named, and print one table."""
    from bench_backend import backend_rows
    from bench_discovery import discovery_rows
    from bench_link import link_rows

    model = stored_demo()
    parts: dict[str, Part] = {
        "backend": lambda _full: backend_rows(model.open_weights()),
        "stages": lambda _full: stage_rows(model),
        "link": lambda _full: link_rows(),
        "memory": lambda _full: memory_rows(model),
        "discovery": lambda _full: discovery_rows(),
    }
    run_parts("foundation", parts)


if __name__ == "__main__":
    main()
