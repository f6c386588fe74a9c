"""``edgepipe doctor``: checks the machine, the network and the peers, and prints a remedy for each problem."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from edgepipe.cli.doctor.findings import Finding, Level, worst
from edgepipe.cli.doctor.measured_view import measure_here
from edgepipe.cli.options import DEGRADED_EXIT, DataDir, Json
from edgepipe.cli.output import columns, make_console, print_json, wrapped
from edgepipe.errors import ConfigInvalid
from edgepipe.interrupts import run_interruptible
from edgepipe.safe_text import one_line

_MARKS = {
    Level.OK: ("✓", "green"),
    Level.NOTE: ("·", "dim"),
    Level.WARNING: ("!", "yellow"),
    Level.PROBLEM: ("✗", "red"),
}


def doctor(
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="PEER", help="A member, or HOST or HOST:PORT of another machine; repeatable."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure this machine's device in at most five minutes, and write the figures to a file."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="With --measure: the file.  [default: named after the chip]"),
    ] = None,
    as_json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Find problems of this machine, the network and peers. Exit code 8 if it finds any."""
    from edgepipe.cli.doctor.examining import examine
    from edgepipe.config import load_config

    if output is not None and not measure:
        raise ConfigInvalid("--output names the file of --measure", next_step="edgepipe doctor --measure --output FILE")
    config = load_config({"data_dir": data_dir}).values
    if measure:
        if peer:
            raise ConfigInvalid("--measure measures this machine alone", next_step="edgepipe doctor --measure")
        measure_here(config, as_json=as_json, output=output)
        return
    findings = run_interruptible(examine(config, peer or [], say=_nothing if as_json else _print_finding))
    level = worst(findings)
    if as_json:
        print_json({"level": level, "findings": [asdict(finding) for finding in findings]})
    else:
        _print_end(findings)
    if level in (Level.WARNING, Level.PROBLEM):
        raise typer.Exit(DEGRADED_EXIT)


def _print_finding(finding: Finding) -> None:
    mark, style = _MARKS[finding.level]
    console, width = make_console(), columns(sys.stdout)
    console.print(f"{mark} ", style=style, end="")
    console.print(wrapped(one_line(finding.what), first="  ", width=width)[2:], soft_wrap=True)
    if finding.fact:
        fact = wrapped(one_line(finding.fact), first="    ", width=width)
        console.print(fact, style="dim", soft_wrap=True)
    if finding.remedy:  # one line of any length, so that it can be copied
        console.print(f"    → {one_line(finding.remedy)}", style="dim", soft_wrap=True)


def _print_end(findings: Sequence[Finding]) -> None:
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    if not problems and not warnings:
        print("\nno problems")
        return
    counts = ((problems, "problem"), (warnings, "warning"))
    parts = [f"{count} {word}{'s' * (count != 1)}" for count, word in counts if count]
    print(f"\n{', '.join(parts)}; each → line is a remedy")


def _nothing(finding: Finding) -> None:
    """Ignore a finding."""
