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

_KEYS = (
    "devices",
    "as-model",
    "link",
    "micro-batches",
    "policy",
    "trim-to-tiles",
    "plan",
    "jitter",
    "context",
    "kv-tokens",
)


def simulate(
    devices: Annotated[str, typer.Option("--devices", help='"4x rtx4090" or "2x m4max, 1x rtx4090".')] = "4x rtx4090",
    as_model: Annotated[str, typer.Option("--as-model", help="Whose shape: qwen2.5-32b, llama-3.3-70b, ...")] = (
        "qwen2.5-32b"
    ),
    link: Annotated[str, typer.Option("--link", help="Between devices: 1gbit,0.3ms or ideal.")] = "1gbit,0.3ms",
    micro_batches: Annotated[str, typer.Option("--micro-batches", help="Micro-batches in flight: auto or K.")] = "auto",
    policy: Annotated[str, typer.Option("--policy", help="throttled or sarathi.")] = "throttled",
    trim_to_tiles: Annotated[bool, typer.Option("--trim-to-tiles", help="Experiment: prefill up to tile edges.")] = (
        False
    ),
    plan: Annotated[str, typer.Option("--plan", help='Layers by device: "a:0-15,b:16-31".', show_default=False)] = "",
    jitter: Annotated[float, typer.Option("--jitter", min=0.0, help="Of step times, over their mean.")] = 0.05,
    context: Annotated[int, typer.Option("--context", min=0, help="Tokens per conversation; 0: the model's.")] = 0,
    kv_tokens: Annotated[int, typer.Option("--kv-tokens", min=0, help="Tokens kept for all; 0: by memory.")] = 0,
    workload: options.WorkloadName = "",
    requests: options.Requests = 256,
    rate: options.Rate = None,
    concurrency: options.Concurrency = None,
    lengths: options.LengthsName = "fixed",
    prompt_tokens: options.PromptTokens = None,
    output_tokens: options.OutputTokens = None,
    prefix_tokens: options.PrefixTokens = 0,
    prefixes: options.Prefixes = 1,
    seed: options.Seed = 0,
    compare: options.Compare = None,
    plot: options.Plot = None,
    as_json: Json = False,
) -> None:
    """Predict what a cluster would do, without it."""
    from edgepipe.cli.report_plot import check_plot, plot_reports
    from edgepipe.cli.report_view import render_reports, reports_as_json

    given = {
        "devices": devices,
        "as-model": as_model,
        "link": link,
        "micro-batches": micro_batches,
        "policy": policy,
        "trim-to-tiles": "yes" if trim_to_tiles else "no",
        "plan": plan or None,
        "jitter": jitter,
        "context": context,
        "kv-tokens": kv_tokens,
        "workload": workload or None,
        "requests": requests,
        "rate": rate,
        "concurrency": concurrency,
        "lengths": lengths,
        "prompt-tokens": prompt_tokens,
        "output-tokens": output_tokens,
        "prefix-tokens": prefix_tokens,
        "prefixes": prefixes,
        "seed": seed,
    }
    settings = {key: str(value) for key, value in given.items() if value is not None}
    variants = read_comparisons(compare or (), keys=(*_KEYS, *options.WORKLOAD_KEYS))
    check_plot(plot)
    reports = _simulate_all(settings, variants)
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
    from edgepipe.backend.devices import parse_devices
    from edgepipe.model.shapes import named_shape
    from edgepipe.planner.imagined import ImaginedCluster, imagine
    from edgepipe.planner.simulator import Run
    from edgepipe.scheduler import make_policy
    from edgepipe.units import parse_link

    cluster = ImaginedCluster(
        devices=parse_devices(settings["devices"]),
        config=named_shape(settings["as-model"]),
        link=parse_link(settings["link"]),
        adjustments={"jitter": settings["jitter"]},
        plan=settings.get("plan", ""),
        context_length=options.count_of(settings, "context", 0, least=0),
        kv_tokens=options.count_of(settings, "kv-tokens", 0, least=0),
        seed=options.count_of(settings, "seed", 0, least=0),
    )
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
