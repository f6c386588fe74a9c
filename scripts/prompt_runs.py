"""Serves cases of ``scripts/bench prompts`` on the emulated runtime: real nodes, stages and links without weights."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite

from prompt_cases import LONG_TOKENS, Case, Served
from prompt_worker import workload_of

from edgepipe.cli.bench.run import EmulatedRun, bench_emulated
from edgepipe.cli.bench.verb import emulated_run
from edgepipe.scheduler.pacing import DEFAULT_ITL_GOAL
from edgepipe.simulation.report import RunReport


def measure(cases: Sequence[Case]) -> list[Served]:
    """Serve cases one after another; cases in a row on the same devices share their nodes."""
    reports = asyncio.run(bench_emulated([_run(case) for case in cases], _tell))
    for case, report in zip(cases, reports, strict=True):
        told = f"the last request's TTFT {report.requests[-1].token_times_s[0] - report.requests[-1].arrival_s:.2f} s"
        print(f"  {case.model}, {case.devices}: {told}", file=sys.stderr, flush=True)
    return [_served(report) for report in reports]


def _run(case: Case) -> EmulatedRun:
    settings = {
        "emulate": case.devices,
        "as-model": case.model,
        "link": case.link,
        "jitter": case.jitter,
        "policy": case.policy,
        "micro-batches": str(case.micro_batches or "auto"),
        "plan": case.plan,
        "itl-goal": _goal(case.goal_s),
    }
    made = emulated_run({**settings, **({"kv-tokens": str(case.kv_tokens)} if case.kv_tokens else {})})
    return replace(made, run=replace(made.run, workload=workload_of(case)))


def _goal(goal_s: float | None) -> str:
    if goal_s is None:
        return DEFAULT_ITL_GOAL
    return f"{1e3 * goal_s:g}ms" if isfinite(goal_s) else "off"


def _served(report: RunReport) -> Served:
    if report.num_failed:
        raise RuntimeError(next(each.error for each in report.requests if each.error))
    short = [each for each in report.requests if each.prompt_tokens < LONG_TOKENS]
    return Served(
        tokens_per_s=report.output_tokens_per_s,
        ttfts_s=[each.token_times_s[0] - each.arrival_s for each in report.requests],
        gaps_s=[b - a for each in short or report.requests for a, b in pairwise(each.token_times_s)],
        num_steps=report.num_steps,
        idle=report.bubble,
        scheduler_s=0.0,
    )


def _tell(what: str, done: int, total: int) -> None:
    if not total or done == total:
        print(f"  {what}", file=sys.stderr, flush=True)
