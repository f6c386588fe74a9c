"""One chat alone: what the host adds to a token, and what drafts bring. ``scripts/bench alone [PART ...]``; parts:

``host``       the time between tokens less the devices' time, on one and on two emulated stages without a network
``processor``  processor time of a step of 8 rows, by process
``stages``     the same part of ``scripts/bench foundation``: SmolLM2 on real torch stages
``emulated``, ``chats``, ``real``, ``models``  see ``scripts/alone_drafts.py``

Predictions, written before the first run, on two cores that nothing else uses. Before: 2.2-2.6 ms beside one stage of
5.7 ms. A token waits for eight wake-ups of about 0.1 ms, four copies through TLS and 0.4 ms of Python. Sampling on the
compute thread, with writes that start at once, saves two wake-ups: 1.8-2.2 ms. Steps that are planned ahead and begin
with the stage's own token leave one thread and no message in the way: 0.2-0.4 ms. Two stages then need three messages
with two wake-ups each: 0.9-1.2 ms.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from alone_drafts import chat_rows, pair_rows, real_rows
from alone_models import model_rows
from bench_engine import imagined
from bench_foundation import stage_rows, stored_demo
from figures import Row, below
from local_nodes import complete_at, median_gap_s, settle
from parts import Part, run_parts

from edgepipe.backend.cost import StepWork
from edgepipe.cli.bench.cluster import emulated_cluster
from edgepipe.cli.bench.run import serve_model
from edgepipe.cli.bench.verb import emulated_run

_RING = {"as-model": "llama-3.1-8b:bf16", "link": "ideal", "jitter": "0"}
_PROMPT_TOKENS, _WARM_UP = 48, 24
_KINDS = ("engine", "stage")
_HOST_MS = {1: 0.5, 2: 1.2}  # bars by the number of stages
_ROWS = 8
_ENGINE_MS, _LOOP_MS = 0.8, 0.7


class _Used(NamedTuple):
    """What the threads of the processes of one kind have used."""

    processor_s: float
    loop_s: float  # processor time of their main threads, which run the event loops
    switches: int  # waits of all threads, each of which ends with a wake-up
    segments: int  # TCP segments with data that they sent: about one for each message; 0 without the program ss

    def since(self, before: _Used) -> _Used:
        """Return what was used after ``before``."""
        return _Used(
            self.processor_s - before.processor_s,
            self.loop_s - before.loop_s,
            self.switches - before.switches,
            self.segments - before.segments,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Answers of one size on one emulated cluster."""

    gap_s: float  # median time between tokens
    device_s: float  # one token's step on all devices, by the cost model
    steps: int
    used: Mapping[str, _Used]  # keys are kinds of processes


def host_rows(full: bool) -> list[Row]:
    """Measure one chat on one stage and on two."""
    rows: list[Row] = []
    for stages, limit_ms in _HOST_MS.items():
        one = _measure(stages=stages, users=1, tokens=768 if full else 256)
        on = f"{stages} stage{'s' * (stages > 1)} of {1e3 * one.device_s / stages:.1f} ms"
        added_ms = 1e3 * (one.gap_s - one.device_s)
        rows.append(below(f"host: ITL p50 less device time, {on}", added_ms, "ms", limit_ms))
        rows += _count_rows(one, on)
    return rows


def _count_rows(measured: _Measured, on: str) -> list[Row]:
    """Return what a token costs in wake-ups and messages."""
    rows: list[Row] = []
    for kind in _KINDS:
        used = measured.used[kind]
        rows.append(Row(f"  waits of the {kind}'s threads, {on}", used.switches / measured.steps, "a token"))
        if used.segments:
            rows.append(Row(f"  TCP segments that the {kind} sends, {on}", used.segments / measured.steps, "a token"))
    return rows


def processor_rows(full: bool) -> list[Row]:
    """Measure the processor time of steps of 8 rows on one stage."""
    some = _measure(stages=1, users=_ROWS, tokens=768 if full else 384)
    per_ms = {
        kind: (1e3 * used.processor_s / some.steps, 1e3 * used.loop_s / some.steps) for kind, used in some.used.items()
    }
    return [
        below(f"engine, processor time of a step of {_ROWS} rows", per_ms["engine"][0], "ms", _ENGINE_MS),
        below(f"stage's loop, processor time of a step of {_ROWS} rows", per_ms["stage"][1], "ms", _LOOP_MS),
        Row("  all threads of the stage, with the emulated backend", per_ms["stage"][0], "ms"),
        Row("  the engine's loop", per_ms["engine"][1], "ms"),
        *_count_rows(some, f"{_ROWS} chats"),
    ]


def _measure(*, stages: int, users: int, tokens: int) -> _Measured:
    settings = {
        **_RING,
        "emulate": f"{stages}x h100",
        "micro-batches": "1" if users > 1 else "auto",
        "workload": "fixed",
        "requests": str(users),
    }
    work = StepWork.of_rows([_PROMPT_TOKENS + tokens // 2] * users, [1] * users, logit_rows=users)
    device_s = sum(stage.step_s(work) for stage in imagined(settings).ring.stages)
    gap_s, steps, used = asyncio.run(_run(settings, users=users, tokens=tokens))
    return _Measured(gap_s=gap_s, device_s=device_s, steps=steps, used=used)


async def _run(settings: Mapping[str, str], *, users: int, tokens: int) -> tuple[float, int, Mapping[str, _Used]]:
    """Return the median gap, the number of steps, and what they used by kind of process."""
    run = emulated_run(settings)
    prompts = [[(7 * place + 13 * user) % 200 + 1 for place in range(_PROMPT_TOKENS)] for user in range(2 * users)]
    async with emulated_cluster(run.cluster) as admin:
        await serve_model(admin, run.serve)
        await complete_at(admin, prompts[:users], max_tokens=_WARM_UP)
        await asyncio.to_thread(settle)
        before = _used()
        answers = await complete_at(admin, prompts[users:], max_tokens=tokens)
        after = _used()
    found: Mapping[str, list[_Used]] = {kind: [] for kind in _KINDS}
    for (kind, pid), used in after.items():
        found[kind].append(used.since(before[kind, pid]))  # no process has begun since: they were at rest
    return median_gap_s(answers), tokens, {kind: _summed(used) for kind, used in found.items()}


def _used() -> Mapping[tuple[str, int], _Used]:
    """Return what each process that this one has started has used so far, by kind and process id."""
    found: dict[tuple[str, int], _Used] = {}
    segments = _segments()
    for process in psutil.Process().children(recursive=True):
        words = process.cmdline()
        kind = next((kind for kind in _KINDS if kind in words), "")
        if kind:
            found[kind, process.pid] = _used_by(process, segments[process.pid])
    return found


def _summed(used: Sequence[_Used]) -> _Used:
    return _Used(
        sum(each.processor_s for each in used),
        sum(each.loop_s for each in used),
        sum(each.switches for each in used),
        sum(each.segments for each in used),
    )


def _segments() -> Counter[int]:
    """Return the TCP segments with data that each process of this machine has sent over its open connections."""
    sent: Counter[int] = Counter()
    if shutil.which("ss"):
        listed = subprocess.run(
            ["ss", "--tcp", "--info", "--numeric", "--processes", "--no-header"],
            capture_output=True,
            text=True,
            check=True,
        )
        owners: list[str] = []
        for line in listed.stdout.splitlines():  # a line of the connection, then one of its figures
            if figures := re.search(r"data_segs_out:(\d+)", line):
                sent.update({int(owner): int(figures[1]) for owner in owners[:1]})
            owners = re.findall(r"pid=(\d+)", line)
    return sent


def _used_by(process: psutil.Process, segments: int) -> _Used:
    threads = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    switches = 0
    for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
        lines = status.read_text().splitlines()
        switches += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))
    return _Used(sum(threads.values()), threads[process.pid], switches, segments)


PARTS: dict[str, Part] = {
    "host": host_rows,
    "processor": processor_rows,
    "stages": lambda _full: stage_rows(stored_demo()),
    "emulated": pair_rows,
    "chats": chat_rows,
    "real": real_rows,
    "models": model_rows,
}


if __name__ == "__main__":
    run_parts("alone", PARTS)
