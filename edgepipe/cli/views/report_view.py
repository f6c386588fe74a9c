"""Reports of runs for people: one table, a column per run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from edgepipe.cli.output import make_table
from edgepipe.safe_text import one_line
from edgepipe.units import format_duration_s

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from edgepipe.simulation.report import Percentiles, RunReport

Row = tuple[str, Callable[["RunReport"], str]]


TERMS = (
    "TTFT: time to an answer's first token. ITL: time between two tokens. TPOT: an answer's mean time per token.",
    "p50, p95, p99: half, 95 % and 99 % of the requests or tokens are at least as fast.",
    "busy: share of time in which a machine computes, and the time of a step. bubble: share in which machines wait.",
    "micro-batches M: groups of requests that are in the pipeline at the same time, each on another machine.",
    "prefix hits: share of the prompts' tokens that were kept from earlier requests.",
)
"""A line for each term of the table."""


def render_reports(reports: Sequence[RunReport]) -> Iterator[RenderableType]:
    """Render the common settings, then a table of all figures, a column per run."""
    yield Text(" · ".join(_common(reports)), style="dim")
    yield Text()
    yield _table(reports)
    for line in TERMS:
        yield Text(line, "dim")
    for report in reports:
        if report.num_failed:
            first = next((record.error for record in report.requests if record.error), "not recorded")
            failed = f"{report.num_failed} requests failed, the first: {one_line(first)}"
            yield Text(f"\n{_title(report)}: {failed}", "yellow")


def reports_as_json(reports: Sequence[RunReport]) -> dict[str, Any]:
    """Convert reports to JSON: ``{"runs": [...]}``."""
    return {"runs": [report.to_dict() for report in reports]}


def _common(reports: Sequence[RunReport]) -> list[str]:
    """Return the settings that all runs share."""
    first = reports[0].facts.settings
    shared = [
        key for key in first if all(report.facts.settings.get(key) == first[key] for report in reports) and first[key]
    ]
    return [f"{key} {one_line(first[key])}" for key in shared]


def _table(reports: Sequence[RunReport]) -> Table:
    compared, titles = _titles(reports)
    table = make_table(compared, *titles, right=titles)
    for name, cell in _rows(reports):
        table.add_row(name, *(cell(report) for report in reports))
    return table


def _titles(reports: Sequence[RunReport]) -> tuple[str, list[str]]:
    """Return the compared settings and each run's values, a line per setting; whole labels if their keys differ."""
    pairs = [[part.partition("=")[::2] for part in report.facts.label.split(" ")] for report in reports]
    keys = {tuple(key for key, _ in run) for run in pairs}
    if len(keys) == 1 and all(keys := keys.pop()):
        return "\n".join(map(one_line, keys)), ["\n".join(one_line(value) for _, value in run) for run in pairs]
    return "", [_title(report) for report in reports]


def _title(report: RunReport) -> str:
    return one_line(report.facts.label) or "RESULT"


def _rows(reports: Sequence[RunReport]) -> Iterator[Row]:
    yield "output tokens/s", lambda report: f"{report.output_tokens_per_s:.1f}"
    yield "  in steady state", lambda report: f"{report.steady_tokens_per_s:.1f}"
    if len(reports) > 1:
        first = reports[0].steady_tokens_per_s
        yield "  against the first", lambda report: f"{report.steady_tokens_per_s / first:.2f}x" if first else "-"
    yield "requests/s", lambda report: f"{report.requests_per_s:.2f}"
    yield from _time_rows("TTFT", lambda report: report.ttft_s)
    yield from _time_rows("ITL", lambda report: report.itl_s)
    yield from _time_rows("TPOT", lambda report: report.tpot_s)
    yield from _stage_rows(reports)
    yield "bubble", lambda report: f"{report.bubble:.1%}"
    yield "tokens/micro-batch", lambda report: f"{report.step_tokens_mean:.1f} ± {report.step_tokens_deviation:.1f}"
    yield "  decodes in a turn", lambda report: f"± {report.decode_rows_deviation:.1f}"
    yield "micro-batches M", _micro_batches
    yield "KV mean · peak", lambda report: f"{report.kv_mean:.0%} · {report.kv_peak:.0%}"
    yield "preemptions", lambda report: str(report.facts.preemptions)
    yield "prefix hits", lambda report: f"{report.prefix_hits:.0%}"
    yield "requests · failed", lambda report: f"{report.num_requests} · {report.num_failed}"
    yield "run", lambda report: format_duration_s(report.duration_s)
    if any(report.facts.real_s for report in reports):
        yield "  real time", _real_time


def _time_rows(name: str, figure: Callable[[RunReport], Percentiles]) -> Iterator[Row]:
    yield f"{name} p50", lambda report: _ms(figure(report).p50)
    yield f"{' ' * len(name)} p95", lambda report: _ms(figure(report).p95)
    yield f"{' ' * len(name)} p99", lambda report: _ms(figure(report).p99)


def _stage_rows(reports: Sequence[RunReport]) -> Iterator[Row]:
    """Make one row per stage, named if all runs have the same stage at that position."""
    for index in range(max(len(report.stages) for report in reports)):
        names = {report.stages[index].name if index < len(report.stages) else "" for report in reports}
        name = one_line(names.pop()) if len(names) == 1 else f"stage {index}"
        yield f"busy {name}", lambda report, index=index: _busy(report, index)


def _busy(report: RunReport, index: int) -> str:
    if index >= len(report.stages):
        return "-"
    stage = report.stages[index]
    return f"{stage.busy:.1%} · {stage.step_s * 1e3:.1f} ms"


def _micro_batches(report: RunReport) -> str:
    counts = [count for _, count in report.micro_batches] or [0]
    if min(counts) == max(counts):
        return str(counts[0])
    return f"{report.micro_batches_mean:.1f} ({min(counts)}-{max(counts)})"


def _real_time(report: RunReport) -> str:
    real_s = report.facts.real_s
    return f"{real_s:.2f} s ({report.duration_s / real_s:.0f}x)" if real_s else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
