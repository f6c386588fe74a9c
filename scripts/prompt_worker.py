"""Simulates cases from stdin, one JSON line each, and writes what they gave to stdout.

``prompt_trees.py`` starts it with this tree's ``edgepipe`` or an older one's, so it uses only what both have.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from statistics import mean
from typing import Any, Protocol

from prompt_cases import LONG_TOKENS, Case, Served

from edgepipe.backend.devices import parse_devices
from edgepipe.scheduler import Scheduler, make_policy
from edgepipe.simulation.fast_forward import FastForwardScheduler
from edgepipe.simulation.imagined import Imagined, ImaginedCluster, imagine
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.simulation.workload import Arrivals, Workload, WorkloadRequest
from edgepipe.store.typed_names import planned_name
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model


class _Answered(Protocol):
    """A request of a simulation. Its class has another name in older trees."""

    @property
    def token_times_s(self) -> Sequence[float]: ...


def main() -> None:
    """Serve every case."""
    for line in sys.stdin:
        print(json.dumps(served(Case.from_json(line))), flush=True)


def served(case: Case) -> Served:
    """Simulate one case. Raises RuntimeError if a request fails."""
    run = Run(
        cluster=cluster_of(case),
        workload=workload_of(case),
        policy=make_policy(case.policy, max_tokens=case.max_tokens),
        micro_batches=case.micro_batches,
    )
    if case.goal_s is not None:
        run = replace(run, itl_goal_s=case.goal_s if isfinite(case.goal_s) else None)
    meter = _Meter()
    if case.timed:
        meter.install()
    report = simulate(run)
    if report.num_failed:
        raise RuntimeError(next(each.error for each in report.requests if each.error))
    short = [each for each in report.requests if each.prompt_tokens < LONG_TOKENS]
    return Served(
        tokens_per_s=report.steady_tokens_per_s if case.users else report.output_tokens_per_s,
        ttfts_s=[each.token_times_s[0] - each.arrival_s for each in report.requests],
        gaps_s=_gaps_s(short or report.requests),
        num_steps=report.num_steps,
        idle=report.bubble,
        scheduler_s=meter.step_s,
    )


def cluster_of(case: Case) -> Imagined:
    """Place the model of a case on its devices."""
    config, weights = named_model(planned_name(case.model))
    if case.context > config.context_length:
        config = replace(config, context_length=case.context)
    return imagine(
        ImaginedCluster(
            devices=parse_devices(case.devices),
            config=config,
            weights=weights,
            link=parse_link(case.link),
            adjustments={"jitter": case.jitter, **dict(case.device_settings)},
            plan=case.plan,
            context_length=case.context,
            kv_tokens=case.kv_tokens,
            seed=case.seed,
        )
    )


def workload_of(case: Case) -> Workload:
    """Return the requests of a case."""
    return Workload(
        arrivals=Arrivals.CLOSED if case.users else Arrivals.TRACE,
        requests=tuple(
            WorkloadRequest(
                index=index,
                arrival_s=None if case.users else each.arrival_s,
                prompt_tokens=each.prompt_tokens,
                output_tokens=each.output_tokens,
                prefix=each.prefix,
            )
            for index, each in enumerate(case.asked)
        ),
        seed=case.seed,
        description="a case",
        concurrency=case.users or None,
        prefix_tokens=case.prefix_tokens,
    )


def _gaps_s(requests: Sequence[_Answered]) -> list[float]:
    return [after - before for each in requests for before, after in pairwise(each.token_times_s)]


class _Meter:
    """Processor time that the scheduler takes in each step."""

    def __init__(self) -> None:
        self._passed_s: list[float] = [0.0]

    @property
    def step_s(self) -> float:
        """Mean without the tenth of the steps that took longest, which other processes disturbed."""
        usual = sorted(self._passed_s)[: max(1, len(self._passed_s) * 9 // 10)]
        return mean(usual)

    def install(self) -> None:
        """Measure every later call, and let no step be skipped."""
        scheduler: Any = Scheduler
        scheduler.next_step = self._measured(scheduler.next_step, begins=True)
        scheduler.retire = self._measured(scheduler.retire, begins=False)
        skipping: Any = FastForwardScheduler
        skipping.steady_steps = lambda _: 0

    def _measured(self, method: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            begun_s = time.thread_time()
            result = method(*given, **named)
            self._passed_s[-1] += time.thread_time() - begun_s
            if begins and result is not None:
                self._passed_s.append(0.0)
            return result

        return call


if __name__ == "__main__":
    main()
