"""Schedules for people: a table of their bubbles, and timelines drawn with letters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from edgepipe.cli.output import make_table
from edgepipe.simulation.schedule_runs import RING_HOP, RING_WEIGHTS

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from edgepipe.simulation.schedule_runs import ScheduleRun, Sizes
    from edgepipe.simulation.schedules import Span, Timeline

_FORWARD, _BACKWARD, _IDLE = "0123456789", "abcdefghij", "·"
_STYLES = {"forward": "black on bright_blue", "backward": "black on yellow", "idle": "dim"}
_WIDEST_PASS = 4  # columns of one slice's pass, in a short run


def render_schedules(runs: Sequence[ScheduleRun], sizes: Sizes, *, width: int) -> Iterator[RenderableType]:
    """Render the table, notes on it, then a timeline of each schedule."""
    yield Text(
        f"stages P {sizes.stages} · micro-batches M {sizes.micro_batches} · slices V {sizes.slices}", style="dim"
    )
    yield Text()
    yield _table(runs)
    yield Text()
    for line in _notes(runs):
        yield Text(line, style="dim")
    for run in runs:
        yield Text()
        if run.timeline is None:
            yield Text(f"{run.name}: not drawn; {run.note}", style="yellow")
        else:
            yield Text(run.name, style="bold")
            yield from draw(run.timeline, width=width)


def _notes(runs: Sequence[ScheduleRun]) -> Iterator[str]:
    yield "BUBBLE: share of time in which machines wait, by the formula. RUN IDLE: the same, counted in the run."
    if any(run.peak_published is not None for run in runs):
        yield "ACTIVATIONS, RUN PEAK: most micro-batches that a machine keeps at once, by the formula and in the run."
    if any(run.length is not None for run in runs):
        yield "LENGTH: of the run; 1 is the time of one micro-batch on one machine."
    if any(run.name.startswith(("interleaved", "dualpipe")) for run in runs):
        yield "BUBBLE of interleaved and dualpipe is over busy time, RUN IDLE over the whole."
    if any(run.rate is not None for run in runs):
        yield f"Decoding: weights take {RING_WEIGHTS} of a full step, a hop {RING_HOP}."
        yield "TOKENS are against M=1; M-fold KV holds M times the conversations."
    yield "Digits: forward or decoding. Letters: backward. Both repeat after ten."


def schedules_as_json(runs: Sequence[ScheduleRun], sizes: Sizes) -> Mapping[str, Any]:
    """Convert the figures to JSON."""
    figures = ("name", "bubble", "idle", "peak_published", "peak", "length", "rate", "note")
    return {
        "stages": sizes.stages,
        "micro_batches": sizes.micro_batches,
        "slices": sizes.slices,
        "schedules": [{name: getattr(run, name) for name in figures} for run in runs],
    }


def draw(timeline: Timeline, *, width: int) -> Iterator[Text]:
    """Draw a line per device, the whole run in ``width`` columns; a column shows the pass at its middle."""
    label = len(str(len(timeline.devices) - 1)) + 1
    shortest = min(span.end - span.start for spans in timeline.devices for span in spans)
    passes = timeline.length / shortest
    per_pass = min(_WIDEST_PASS, int((width - label) / passes))
    columns = round(passes * per_pass) if per_pass else width - label
    for device, spans in enumerate(timeline.devices):
        line = Text(f"{device}".ljust(label), no_wrap=True)
        for char, kind in _cells(spans, timeline, columns):
            line.append(char, style=_STYLES[kind])
        yield line


def _cells(spans: Sequence[Span], timeline: Timeline, columns: int) -> Iterator[tuple[str, str]]:
    at, step = 0, timeline.length / columns
    for column in range(columns):
        middle = (column + 0.5) * step
        while at < len(spans) and spans[at].end <= middle:
            at += 1
        if at == len(spans) or spans[at].start > middle:
            yield _IDLE, "idle"
            continue
        op = spans[at].op
        yield (
            (_BACKWARD if op.backward else _FORWARD)[timeline.number(op) % 10],
            "backward" if op.backward else "forward",
        )


def _table(runs: Sequence[ScheduleRun]) -> Table:
    """Build the table without columns that no run fills."""
    columns = {
        "BUBBLE": [f"{run.bubble:.1%}" for run in runs],
        "RUN IDLE": [_or_dash(run.idle, ".1%") for run in runs],
        "ACTIVATIONS": [_or_dash(run.peak_published, "d") for run in runs],
        "RUN PEAK": [_or_dash(run.peak, "d") for run in runs],
        "LENGTH": [_or_dash(run.length, ".1f") for run in runs],
        "TOKENS": [_or_dash(run.rate, ".2f", "x") for run in runs],
    }
    shown = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    table = make_table("SCHEDULE", *shown, right=tuple(shown))
    for run, *cells in zip(runs, *shown.values(), strict=True):
        table.add_row(run.name, *cells)
    return table


def _or_dash(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
