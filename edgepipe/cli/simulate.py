"""``edgepipe simulate``: predicts a cluster's speed within seconds, before a machine is bought or moved."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli import workload_options as options
from edgepipe.cli.options import Json
from edgepipe.cli.output import make_console, print_json
from edgepipe.cli.views.comparing import Variant, read_comparisons
from edgepipe.errors import ConfigInvalid, EdgepipeError

if TYPE_CHECKING:
    from edgepipe.backend.drafting import ImaginedDrafts
    from edgepipe.simulation.imagined import Imagined
    from edgepipe.simulation.report import RunReport
    from edgepipe.simulation.simulator import Run

_DEVICES = "4x rtx4090"  # the default
_STAGES, _MICRO_BATCHES, _SLICES = 4, 8, 2  # defaults of schedules
_DRAWING_COLUMNS = 200  # width of a drawn schedule, also in a wider terminal or a pipe
_KEYS = ("devices", "layout", "slices", *options.CLUSTER_KEYS, *options.WORKLOAD_KEYS)


@options.with_run_options
def simulate(
    *,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", metavar="DEVICES", help='"2x m4max, 1x rtx4090".  [default: 4x rtx4090]', show_default=False
        ),
    ] = None,
    settings: Mapping[str, str],
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="pipeline, replicas (two shorter ones) or interleaved (--slices per device).  [default: pipeline]",
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            metavar="NAMES",
            help="Compare and draw textbook schedules: all, or naive, gpipe, 1f1b, interleaved, dualpipe, decode.",
            show_default=False,
        ),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option("--stages", metavar="P", help="Stages of a schedule.  [default: 4]", min=1, show_default=False),
    ] = None,
    slices: Annotated[
        int | None,
        typer.Option(
            "--slices", metavar="V", help="Slices per device, interleaved.  [default: 2]", min=1, show_default=False
        ),
    ] = None,
    compare: options.Compare = None,
    plot: options.Plot = None,
    as_json: Json = False,
) -> None:
    """Predict the speed of a cluster that need not exist."""
    from edgepipe.cli.views.report_plot import check_plot, plot_reports
    from edgepipe.cli.views.report_view import render_reports, reports_as_json
    from edgepipe.simulation.layouts import verdict

    check_plot(plot)
    if schedule is not None:
        given = {"compare": compare, "devices": devices, "layout": layout, **settings}
        given.pop("micro-batches", None)
        _refuse([name for name, value in given.items() if value], "does not go with --schedule")
        count = _fixed_micro_batches(settings.get("micro-batches", "auto")) or _MICRO_BATCHES
        _compare_schedules(schedule, sizes=(stages or _STAGES, count, slices or _SLICES), plot=plot, as_json=as_json)
        return
    _refuse(["stages"] if stages else [], "goes with --schedule")
    if layout != "interleaved" and not any("layout" in text for text in compare or ()):
        _refuse(["slices"] if slices else [], "goes with --schedule or --layout interleaved")
    own = {
        "devices": _DEVICES if devices is None else devices,
        "layout": layout or "pipeline",
        "slices": str(slices or _SLICES),
    }
    variants = read_comparisons(compare or (), keys=_KEYS)
    reports = _simulate_all({**options.CLUSTER_DEFAULTS, **own, **settings}, variants)
    if plot is not None:
        plot_reports(reports, plot)
    if as_json:
        print_json(reports_as_json(reports))
        return
    console = make_console()
    for part in render_reports(reports):
        console.print(part)
    layouts = [
        (dict(variant.changes).get("layout", ""), report) for variant, report in zip(variants, reports, strict=True)
    ]
    if len({name for name, _ in layouts}) == len(layouts) > 1:
        console.print(f"\nverdict: {verdict(layouts)}")


def _refuse(flags: Sequence[str], why: str) -> None:
    """Raise ConfigInvalid for the first of ``flags``; do nothing without flags."""
    if flags:
        raise ConfigInvalid(
            f"--{flags[0]} {why}",
            fact="--schedule draws textbook schedules; without it, edgepipe simulates devices",
            next_step="edgepipe simulate --help",
        )


def _compare_schedules(text: str, *, sizes: tuple[int, int, int], plot: Path | None, as_json: bool) -> None:
    """Compare and draw textbook schedules. Raises ConfigInvalid."""
    from edgepipe.cli.views.schedule_plot import plot_schedules
    from edgepipe.cli.views.schedule_view import render_schedules, schedules_as_json
    from edgepipe.simulation.schedule_runs import Sizes, compare_schedules, read_schedules

    wanted = Sizes(stages=sizes[0], micro_batches=sizes[1], slices=sizes[2])
    runs = compare_schedules(read_schedules(text), wanted)
    if plot is not None:
        plot_schedules(runs, plot)
    if as_json:
        print_json(schedules_as_json(runs, wanted))
        return
    console = make_console()
    for part in render_schedules(runs, wanted, width=min(console.width, _DRAWING_COLUMNS)):
        console.print(part)


def _simulate_all(settings: Mapping[str, str], variants: tuple[Variant, ...]) -> list[RunReport]:
    """Simulate all runs. Build every run before the first one starts, so that a mistake in any shows at once."""
    made = [_make_variant(settings, variant) for variant in variants]
    reports: list[RunReport] = []
    with make_console(stderr=True).status("simulating") as status:
        for runs in made:
            status.update(f"simulating {runs[0].label}")
            reports.append(_timed(runs))
    return reports


def _make_variant(settings: Mapping[str, str], variant: Variant) -> list[Run]:
    """Make a variant's runs. Raises the errors of ``_make_runs``, with the variant's label."""
    try:
        return _make_runs({**settings, **variant.changes}, variant.label)
    except EdgepipeError as error:
        raise error.changed(what=f"{variant.label}: {error.what}" if variant.label else error.what) from error


def _timed(runs: Sequence[Run]) -> RunReport:
    """Simulate pipelines that serve one workload together."""
    from dataclasses import replace

    from edgepipe.simulation.batch_choice import simulate_auto
    from edgepipe.simulation.layouts import merged
    from edgepipe.simulation.simulator import simulate as simulate_run

    started_s = time.perf_counter()
    reports = [simulate_auto(run) if run.batch_way == "auto" else simulate_run(run) for run in runs]
    report = reports[0] if len(reports) == 1 else merged(reports)
    return replace(report, facts=replace(report.facts, real_s=time.perf_counter() - started_s))


def _fixed_micro_batches(text: str) -> int:
    """Return K, or 0 for ``auto``. Raises ConfigInvalid."""
    if text == "auto":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise ConfigInvalid(f"--micro-batches cannot be '{text}'", next_step="give auto, or a number of 1 or more")
    return int(text)


def _make_runs(settings: Mapping[str, str], label: str) -> list[Run]:
    """Make one run per pipeline of the layout. Raises ConfigInvalid, ModelUnknown, PlanInvalid, NoFeasiblePlacement."""
    from dataclasses import replace

    from edgepipe.scheduler import make_policy
    from edgepipe.scheduler.pacing import parse_itl_goal
    from edgepipe.simulation.imagined import imagine
    from edgepipe.simulation.layouts import DeviceLayout, clusters_of, shares
    from edgepipe.simulation.simulator import Run
    from edgepipe.spec.drafting import drafting

    cluster = options.imagined_cluster(settings, devices=settings["devices"])
    if settings["draft"] == "mtp":
        cluster = replace(cluster, config=drafting(cluster.config, settings["as-model"]))
    layout = DeviceLayout(kind=settings["layout"], slices=options.count_of(settings, "slices", _SLICES))
    clusters = clusters_of(cluster, layout)
    workload = options.make_workload_of(settings)
    shown = {
        key: settings[key]
        for key in ("devices", "layout", "link", "policy", "micro-batches", "draft", "jitter", "seed")
    }
    return [
        Run(
            cluster=imagined,
            workload=share,
            policy=make_policy(settings["policy"]),
            itl_goal_s=parse_itl_goal(settings["itl-goal"]),
            batch_way=settings["policy"] if settings["policy"] in ("temporal", "auto") else "",
            drafts=_drafts(settings["draft"], imagined),
            micro_batches=_fixed_micro_batches(settings["micro-batches"]),
            label=label,
            settings={**shown, "model": settings["as-model"], "workload": workload.description},
        )
        for imagined, share in zip(map(imagine, clusters), shares(workload, len(clusters)), strict=True)
    ]


def _drafts(text: str, imagined: Imagined) -> ImaginedDrafts | None:
    """Return what drafts in a simulation; None: nothing. Raises ConfigInvalid."""
    from edgepipe.backend.drafting import ImaginedDrafts

    if text == "off":
        return None
    return ImaginedDrafts.by_own_layer(imagined.draft_s) if text == "mtp" else ImaginedDrafts.of(text)
