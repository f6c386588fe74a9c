"""Charts of runs: a timeline of the stages, and the tokens of each micro-batch."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgepipe.errors import ConfigInvalid, FeatureMissing
from edgepipe.plain_words import plain

if TYPE_CHECKING:
    from edgepipe.simulation.report import RunReport, StepRecord

_EXAMPLE = "name a file like out.png"
_TURNS_SHOWN = 4  # turns of the whole ring in the timeline
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#edc948", "#76b7b2", "#9c755f")
_DECODE, _PREFILL, _M = "#4e79a7", "#f28e2b", "#222222"


def plot_reports(reports: Sequence[RunReport], path: Path) -> None:
    """Write a chart; the file's suffix sets its format. Raises FeatureMissing, ConfigInvalid.

    Per run: a timeline of a few turns in the middle (a bar is a step on a stage, hatched where it holds prefill),
    tokens per micro-batch with M over the whole run, and the KV cache with the ends of phases.
    """
    figure = new_figure(height=7.8 * len(reports))
    draws = (_draw_timeline, _draw_tokens, _draw_kv)
    for (index, report), (place, draw) in itertools.product(enumerate(reports), enumerate(draws, start=1)):
        draw(figure.add_subplot(len(draws) * len(reports), 1, len(draws) * index + place), report)
    save_figure(figure, path)


def check_plot(path: Path | None) -> None:
    """Check before a long run that ``plot_reports`` can write. Raises FeatureMissing, ConfigInvalid."""
    if path is None:
        return
    kinds = new_figure(height=1).canvas.get_supported_filetypes()
    if not path.parent.is_dir():
        raise ConfigInvalid(f"'{path}' cannot be written", fact=f"there is no folder {path.parent}", next_step=_EXAMPLE)
    if path.suffix[1:].lower() not in kinds:
        raise ConfigInvalid(f"'{path}' is no chart", fact=f"formats: {', '.join(kinds)}", next_step=_EXAMPLE)


def new_figure(*, height: float) -> Any:
    """Make an empty figure; ``height`` in inches. Raises FeatureMissing."""
    try:
        module: Any = import_module("matplotlib.figure")
    except ImportError:
        raise FeatureMissing(
            "plots need matplotlib", fact="it is not installed", next_step="edgepipe update --extra plot"
        ) from None
    return module.Figure(figsize=(12, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure. Raises ConfigInvalid."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"'{path}' cannot be written", fact=plain(error), next_step=_EXAMPLE) from error


def _draw_timeline(axes: Any, report: RunReport) -> None:
    axes.set_title(_title(report, "steps of the stages"), loc="left", fontsize=10)
    names = [stage.name for stage in report.stages]
    steps = _middle(report.steps)
    if steps:
        origin_s = min(start for step in steps for start, _ in step.stages)
        for step in steps:
            for index, (start_s, end_s) in enumerate(step.stages):
                axes.barh(
                    index,
                    (end_s - start_s) * 1e3,
                    left=(start_s - origin_s) * 1e3,
                    height=0.8,
                    color=_COLOURS[step.step % len(_COLOURS)],
                    hatch="///" if step.prefill_tokens else None,
                    edgecolor="white",
                    linewidth=0.5,
                )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms; colours are micro-batches, hatched ones hold prefill", fontsize=8)


def _draw_tokens(axes: Any, report: RunReport) -> None:
    axes.set_title(_title(report, "tokens per micro-batch"), loc="left", fontsize=10)
    times = [step.planned_s for step in report.steps]
    decodes = [step.decode_rows for step in report.steps]
    totals = [step.num_tokens for step in report.steps]
    axes.fill_between(times, totals, step="post", color=_PREFILL, linewidth=0, label="prefill")
    axes.fill_between(times, decodes, step="post", color=_DECODE, linewidth=0, label="decode")
    axes.set_yscale("function", functions=(np.sqrt, np.square))  # decode has few tokens, prefill many
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens")
    axes.set_xlabel("s", fontsize=8)
    counts = axes.twinx()
    counts.step(times, [step.micro_batches for step in report.steps], where="post", color=_M, linewidth=1, label="M")
    counts.set_ylim(0, 1.3 * max([step.micro_batches for step in report.steps] or [1]))
    counts.yaxis.get_major_locator().set_params(integer=True)
    counts.set_ylabel("M")
    handles = [*axes.get_legend_handles_labels()[0], *counts.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper right", fontsize=8, ncols=3)


def _draw_kv(axes: Any, report: RunReport) -> None:
    spread = f"decodes of a turn's micro-batches deviate by {report.decode_rows_deviation:.1f} rows"
    axes.set_title(_title(report, f"KV cache in use; {spread}"), loc="left", fontsize=10)
    shares = [step.used_blocks / max(1, report.facts.num_blocks) for step in report.steps]
    axes.plot([step.planned_s for step in report.steps], shares, color=_DECODE, linewidth=1)
    switches = [
        place for place, step in enumerate(report.steps) if place and _begins_phase(report.steps[place - 1], step)
    ]
    axes.plot(
        [report.steps[place].planned_s for place in switches],
        [shares[place] for place in switches],
        ".",
        color=_PREFILL,
        label="change between prompts and decodes",
    )
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("s", fontsize=8)
    axes.legend(loc="lower right", fontsize=8)


def _begins_phase(before: StepRecord, step: StepRecord) -> bool:
    """Return whether prompts alone follow decodes alone, or the reverse."""
    both = any(each.prefill_tokens and each.decode_rows for each in (before, step))
    return not both and bool(before.prefill_tokens) != bool(step.prefill_tokens)


def _middle(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the steps of a few turns after half of the tokens: the end of a run may have few sequences for long."""
    timed = [step for step in steps if step.stages]
    if not timed:
        return ()
    done = list(itertools.accumulate(step.num_tokens for step in timed))
    middle = bisect_left(done, done[-1] / 2)
    half = max(2, timed[middle].micro_batches * _TURNS_SHOWN // 2)
    return timed[max(0, middle - half) : middle + half]


def _title(report: RunReport, title: str) -> str:
    return f"{report.facts.label}: {title}" if report.facts.label else title
