"""``edgepipe bench``: measures real nodes under load; their devices may be emulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli import workload_options as options
from edgepipe.cli.options import DataDir, Json, data_dir_of
from edgepipe.cli.output import make_console, print_json
from edgepipe.cli.views.comparing import Variant, read_comparisons
from edgepipe.errors import ConfigInvalid
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.cli.bench.run import BenchRun, EmulatedRun
    from edgepipe.simulation.report import RunReport

_KEYS = ("emulate", *options.CLUSTER_KEYS, *options.WORKLOAD_KEYS)


@options.with_run_options
def bench(
    *,
    emulate: Annotated[
        str,
        typer.Option(
            "--emulate",
            metavar="DEVICES",
            help='Measure emulated devices on this machine: "4x rtx4090".  [default: the running cluster]',
        ),
    ] = "",
    settings: Mapping[str, str],
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="The model to measure; required if several are served.", show_default=False
        ),
    ] = "",
    compare: options.Compare = None,
    plot: options.Plot = None,
    as_json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Measure the throughput and latencies of a cluster under load."""
    from edgepipe.cli.views.report_plot import check_plot, plot_reports
    from edgepipe.cli.views.report_view import render_reports, reports_as_json

    settings = {**settings, **({"emulate": emulate} if emulate else {})}
    variants = read_comparisons(compare or (), keys=_KEYS)
    check_plot(plot)
    reports = _run_all(settings, variants, model=model, data_dir=data_dir)
    if plot is not None:
        plot_reports(reports, plot)
    if as_json:
        print_json(reports_as_json(reports))
        return
    console = make_console()
    for part in render_reports(reports):
        console.print(part)


def _run_all(
    settings: Mapping[str, str], variants: Sequence[Variant], *, model: str, data_dir: Path | None
) -> list[RunReport]:
    """Do all runs. Build every run before the first one starts, so that a mistake in any shows at once."""
    from edgepipe.cli.admin import ask_node, run_async
    from edgepipe.cli.bench.run import bench_emulated, bench_served

    merged = [({**settings, **variant.changes}, variant.label) for variant in variants]
    emulated = [each for each, _ in merged if "emulate" in each]
    if emulated and (model or data_dir or len(emulated) != len(merged)):
        raise ConfigInvalid(
            "--emulate contradicts --model and --data-dir", next_step="leave out --emulate, or the other two"
        )
    if emulated:
        runs = [emulated_run(each, label) for each, label in merged]
        with _Progress() as progress:
            return run_async(bench_emulated(runs, progress.tell))
    served = [_served_run(each, label) for each, label in merged]
    with _Progress() as progress:
        return ask_node(data_dir_of(data_dir), lambda admin: bench_served(admin, served, model, progress.tell))


def _served_run(settings: Mapping[str, str], label: str) -> BenchRun:
    """Build a run on the running cluster. Raises ConfigInvalid for settings of an emulated cluster."""
    from edgepipe.cli.bench.run import BenchRun

    if wrong := [key for key in options.CLUSTER_KEYS if key in settings]:
        raise ConfigInvalid(
            f"--{wrong[0]} goes with --emulate",
            fact="a running cluster keeps its own settings",
            next_step=f"leave --{wrong[0]} out, or add --emulate",
        )
    workload = options.make_workload_of(settings)
    return BenchRun(workload=workload, label=label, settings={"workload": workload.description})


def emulated_run(given: Mapping[str, str], label: str = "") -> EmulatedRun:
    """Build the run that settings describe. Raises ConfigInvalid, ModelUnknown, PlanInvalid, NoFeasiblePlacement."""
    from edgepipe.cli.bench.cluster import EmulatedCluster
    from edgepipe.cli.bench.run import BenchRun, EmulatedRun
    from edgepipe.cli.serve import serve_request
    from edgepipe.simulation.imagined import imagine
    from edgepipe.store.typed_names import planned_name
    from edgepipe.weights.mixes import split_mix

    settings = {**options.CLUSTER_DEFAULTS, **given}
    settings["as-model"] = planned_name(settings["as-model"])
    cluster = options.imagined_cluster(settings, devices=settings["emulate"])
    imagined = imagine(cluster)
    limits = imagined.limits
    workload = options.make_workload_of(settings)
    shown = {key: settings[key] for key in ("link", "policy", "micro-batches", "draft", "jitter", "seed")}
    draft_model = _draft_model(settings["draft"])
    emulated = EmulatedCluster(
        devices=cluster.devices,
        model=settings["as-model"],
        config=cluster.config,
        mix=split_mix(settings["as-model"])[1],
        link=settings["link"],
        settings={**cluster.adjustments, **draft_model},
    )
    return EmulatedRun(
        run=BenchRun(
            workload=workload,
            label=label,
            settings={
                "devices": settings["emulate"],
                "model": settings["as-model"],
                **shown,
                "workload": workload.description,
            },
        ),
        cluster=emulated,
        serve=serve_request(
            emulated.served_name,
            plan=imagined.plan,
            micro_batches=settings["micro-batches"],
            policy=settings["policy"],
            itl_goal=settings["itl-goal"],
            draft="auto" if draft_model else settings["draft"],
            context=cluster.context_length,
            kv_tokens=limits.num_blocks * limits.block_size,
            kv=cluster.kv or "auto",
        ),
    )


def _draft_model(text: str) -> dict[str, str]:
    """Return the settings of an emulated draft model: ``"0.7,3ms"``. Empty for "lookup" and "off"."""
    from edgepipe.backend.drafting import ImaginedDrafts

    if text in ("lookup", "off"):
        return {}
    ImaginedDrafts.of(text)
    acceptance, _, time = text.rpartition(",")
    return {"draft_acceptance": acceptance, "draft_time": time}


class _Progress:
    """Progress bar on stderr, if that is a terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = make_console(stderr=True)
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("preparing", total=None)

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tell(self, step: str, done: int, total: int) -> None:
        """See ``OnProgress``."""
        self._progress.update(self._task, description=one_line(step), completed=done, total=total or None)
