"""Charts of schedules: a line per device, a bar per pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgepipe.cli.views.report_plot import new_figure, save_figure

if TYPE_CHECKING:
    from edgepipe.simulation.schedule_runs import ScheduleRun

_FORWARD = ("#9ecae1", "#4e79a7")  # alternating, to tell neighbouring micro-batches apart
_BACKWARD = ("#fdd0a2", "#f28e2b")
_MOST_NUMBERED = 700  # passes labelled with their micro-batch
_HEIGHT_PER_DEVICE, _HEIGHT_AROUND = 0.24, 0.9  # inches


def plot_schedules(runs: Sequence[ScheduleRun], path: Path) -> None:
    """Write a chart of the feasible schedules; the suffix sets its format. Raises FeatureMissing, ConfigInvalid."""
    drawn = [run for run in runs if run.timeline is not None]
    devices = max(len(run.timeline.devices) for run in drawn if run.timeline is not None)
    figure = new_figure(height=len(drawn) * (_HEIGHT_AROUND + _HEIGHT_PER_DEVICE * devices))
    for index, run in enumerate(drawn):
        _draw(figure.add_subplot(len(drawn), 1, index + 1), run)
    save_figure(figure, path)


def _draw(axes: Any, run: ScheduleRun) -> None:
    timeline = run.timeline
    assert timeline is not None
    axes.set_title(
        f"{run.name}: idle {run.idle:.1%} of the run, {run.bubble:.1%} by its formula", loc="left", fontsize=10
    )
    numbered = sum(map(len, timeline.devices)) <= _MOST_NUMBERED
    for device, spans in enumerate(timeline.devices):
        axes.broken_barh(
            [(span.start, span.end - span.start) for span in spans],
            (device - 0.45, 0.9),
            facecolors=[(_BACKWARD if op.backward else _FORWARD)[timeline.number(op) % 2] for op, _, _ in spans],
            edgecolor="white",
            linewidth=0.3,
        )
        for op, start, end in spans if numbered else ():
            axes.text((start + end) / 2, device, timeline.number(op), ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(timeline.devices)))
    axes.set_xlim(0, timeline.length)
    axes.set_ylim(len(timeline.devices) - 0.5, -0.5)
    unit = "all as one batch" if run.name == "naive" else "one micro-batch"
    axes.set_xlabel(f"passes of {unit} through one stage; blue forward, orange backward", fontsize=8)
