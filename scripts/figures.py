"""Rows of a table of figures: each with its unit, the baseline measured in the same run, their ratio and the target."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from edgepipe.config import prepare_environment

prepare_environment()  # every bench imports this before gRPC, which reads its settings then
os.environ.setdefault("EDGEPIPE_LOCAL_KEY", "no")  # benches ask their nodes' HTTP as it is on one person's computer

ROOT = Path(__file__).resolve().parent.parent
_AT_START = psutil.cpu_times()
_MUCH_STOLEN = 0.02  # share of the processors' time that others on this virtual machine's host take


class Row(NamedTuple):
    """One figure. ``met``: whether it meets its target; None without one."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    baseline_name: str = ""
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


def at_least(name: str, value: float, unit: str, baseline: float, baseline_name: str, target: float) -> Row:
    """Higher is better: value over baseline must reach the target."""
    ratio = value / baseline
    return Row(name, value, unit, baseline, baseline_name, ratio, f">= {target:.2f}x", ratio >= target)


def at_most(name: str, value: float, unit: str, baseline: float, baseline_name: str, target: float) -> Row:
    """Lower is better: value over baseline must stay below the target."""
    ratio = value / baseline
    return Row(name, value, unit, baseline, baseline_name, ratio, f"<= {target:.2f}x", ratio <= target)


def below(name: str, value: float, unit: str, limit: float) -> Row:
    """An absolute limit, for what has no baseline."""
    return Row(name, value, unit, target=f"<= {limit:g} {unit}", met=value <= limit)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """The table for people, then one JSON line for scripts."""
    table = Table(title=title, title_justify="left")
    for column in ("figure", "value", "unit", "baseline", "of", "ratio", "target", ""):
        table.add_column(column, justify="right" if column in ("value", "baseline", "ratio") else "left")
    for row in rows:
        mark = {True: "met", False: "MISSED", None: ""}[row.met]
        ratio = f"{row.ratio:.2f}x" if row.ratio is not None else ""
        table.add_row(
            row.name, _number(row.value), row.unit, _number(row.baseline), row.baseline_name, ratio, row.target, mark
        )
    _print_table(title, table, rows, width=140)


def print_lines(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], rows: Sequence[Row]) -> None:
    """A table of columns of its own for people, then its figures as one JSON line for scripts."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for line in lines:
        table.add_row(*line)
    _print_table(title, table, rows, width=180)


def _print_table(title: str, table: Table, rows: Sequence[Row], *, width: int) -> None:
    console = Console(width=max(width, Console().width))
    console.print(table)
    if stolen() > _MUCH_STOLEN:
        console.print(f"The host kept {stolen():.0%} of the processors' time from this machine: figures are too low.")
    print(json.dumps({"bench": title, "rows": [row._asdict() for row in rows], **machine()}))


def stolen() -> float:
    """Share of the processors' time that a virtual machine's host gave to others since the start; 0 where it is not
    told."""
    now = psutil.cpu_times()
    passed_s = sum(now[:8]) - sum(_AT_START[:8])  # what guests take is in the first of them
    return (getattr(now, "steal", 0.0) - getattr(_AT_START, "steal", 0.0)) / max(passed_s, 0.01)


def machine() -> dict[str, str | int | float | None]:
    """What the figures were measured on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "stolen": round(stolen(), 3),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
