"""Benches of several parts: which of them to run, and tests as rows."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

from figures import ROOT, Row, print_rows

Part = Callable[[bool], list[Row]]
"""Measures; the argument says whether in full."""


def run_parts(title: str, parts: Mapping[str, Part], *, if_named: Mapping[str, Part] | None = None) -> None:
    """Measure the parts that the command line names, all of ``parts`` unless it names any, and print the table."""
    known = {**parts, **(if_named or {})}
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(known))
    parser.add_argument("--full", action="store_true")
    wanted = parser.parse_args()
    if unknown := set(wanted.parts) - set(known):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    rows: list[Row] = []
    for name in wanted.parts or parts:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        found = known[name](wanted.full)
        for row in found:  # as it comes: a later part may take long
            beside = "" if row.ratio is None else f", {row.ratio:.2f}x of {row.baseline_name}"
            missed = ", MISSED" if row.met is False else ""
            print(f"  {row.name}: {row.value:.3g} {row.unit}{beside}{missed}", file=sys.stderr, flush=True)
        rows += found
    print_rows(title, rows)


def tested(name: str, files: tuple[str, ...], *flags: str) -> Row:
    """Run tests; all must pass."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        begun_s = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *flags, *files]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            for key in counts:
                counts[key] += int(suite.get(key, "0"))
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    met = passed + counts["skipped"] == counts["tests"] > 0
    took_s = time.perf_counter() - begun_s
    return Row(f"{name}: pytest {' '.join(files)}", passed, "passed", took_s, "seconds", target="all", met=met)


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural where it is not one."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
