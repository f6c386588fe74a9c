"""``edgepipe simulate``: what a cluster would do, worked out in seconds, before anybody buys or moves a machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli import workload_options as options
from edgepipe.cli.comparing import Variant, read_comparisons
from edgepipe.cli.options import Json
from edgepipe.cli.output import make_console, print_json
from edgepipe.errors import ConfigInvalid

if TYPE_CHECKING:
    from edgepipe.planner.report import RunReport
    from edgepipe.planner.simulator import Run

_KEYS = ("devices", "trim-to-tiles", *options.CLUSTER_KEYS, *options.WORKLOAD_KEYS)


@options.with_run_options
def simulate(
    *,
    devices: Annotated[str, typer.Option("--devices", help='"4x rtx4090" or "2x m4max, 1x rtx4090".')] = "4x rtx4090",
    settings: Mapping[str, str],
    trim_to_tiles: Annotated[bool, typer.Option("--trim-to-tiles", help="Experiment: prefill up to tile edges.")] = (
        False
    ),
    compare: options.Compare = None,
    plot: options.Plot = None,
    as_json: Json = False,
) -> None:
    """Predict what a cluster would do, without it."""
    from edgepipe.cli.report_plot import check_plot, plot_reports
    from edgepipe.cli.report_view import render_reports, reports_as_json

    own = {"devices": devices, "trim-to-tiles": "yes" if trim_to_tiles else "no"}
    variants = read_comparisons(compare or (), keys=_KEYS)
    check_plot(plot)
    reports = _simulate_all({**options.CLUSTER_DEFAULTS, **own, **settings}, variants)
    if plot is not None:
        plot_reports(reports, plot)
    if as_json:
        print_json(reports_as_json(reports))
        return
    console = make_console()
    for part in render_reports(reports):
        console.print(part)


def _simulate_all(settings: Mapping[str, str], variants: tuple[Variant, ...]) -> list[RunReport]:
    """All runs are made ready before the first begins: a mistake in the last is told at once."""
    runs = [_make_run({**settings, **variant.changes}, variant.label) for variant in variants]
    reports: list[RunReport] = []
    with make_console(stderr=True).status("simulating") as status:
        for run in runs:
            status.update(f"simulating {run.label}")
            reports.append(_timed(run))
    return reports


def _timed(run: Run) -> RunReport:
    from dataclasses import replace

    from edgepipe.planner.simulator import simulate as simulate_run

    started_s = time.perf_counter()
    report = simulate_run(run)
    return replace(report, facts=replace(report.facts, real_s=time.perf_counter() - started_s))


def _fixed_micro_batches(text: str) -> int:
    """K, or 0 for ``auto``. Raises ConfigInvalid."""
    if text == "auto":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise ConfigInvalid(f"'{text}' is no value for --micro-batches", fact="it is auto, or a number of 1 or more")
    return int(text)


def _make_run(settings: Mapping[str, str], label: str) -> Run:
    """Raises ConfigInvalid, ModelUnknown, PlanInvalid, NoFeasiblePlacement."""
    from edgepipe.planner.imagined import imagine
    from edgepipe.planner.simulator import Run
    from edgepipe.scheduler import make_policy

    cluster = options.imagined_cluster(settings, devices=settings["devices"])
    workload = options.make_workload_of(settings)
    micro_batches = settings["micro-batches"]
    return Run(
        cluster=imagine(cluster),
        workload=workload,
        policy=make_policy(settings["policy"], trim_to_tiles=settings["trim-to-tiles"] == "yes"),
        micro_batches=_fixed_micro_batches(micro_batches),
        label=label,
        settings={
            "devices": settings["devices"],
            "model": settings["as-model"],
            "link": settings["link"],
            "policy": settings["policy"],
            "micro-batches": micro_batches,
            "workload": workload.description,
            "jitter": settings["jitter"],
            "seed": settings["seed"],
        },
    )
