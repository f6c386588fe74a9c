"""The page ``docs/measured.md``: what devices of people measured, from the files of ``docs/measured``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from edgepipe.cli.doctor.measurement import Measured, figure_lines, kernel_line, measured_from

ROOT = Path(__file__).resolve().parent.parent
FOLDER, TARGET = ROOT / "docs" / "measured", ROOT / "docs" / "measured.md"
KINDS = (("NVIDIA GPUs", "GPU", "cuda"), ("Macs", "Mac", "gpu"), ("Processors", "processor", "cpu"))

INTRODUCTION = """# Measured

Written by `scripts/gen_docs` from the files in `docs/measured`, each written by `edgepipe doctor
--measure` on one machine. If your device is missing, attach its file to a report.

Predictions come from [data sheets](architecture/planner.md#data-sheets), as they were in the
version that measured. A speed above 1.00x is better than predicted. Weights are made up; decoded
rows attend to 64 tokens each. Rates of whole models follow from some of their layers and the head."""


def measured_page(found: Sequence[Measured]) -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for title, noun, device in KINDS:
        rows = [each for each in found if each.device.startswith(device)]
        parts.append(f"## {title}")
        if not rows:
            parts.append(f"No {noun} has measured this version yet.")
        parts += [_section(each) for each in rows]
    return "\n\n".join(parts) + "\n"


def read_measurements(folder: Path = FOLDER) -> list[Measured]:
    """Read all files, by chip and date."""
    found = [measured_from(json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda each: (each.chip, each.date))


def _section(found: Measured) -> str:
    cores = f", {found.cores} cores" if found.device == "cpu" else ""
    libraries = ", ".join(f"{name} {version}" for name, version in found.libraries.items())
    lines = [
        f"### {found.chip}{cores}",
        "",
        f"{found.date}, edgepipe {found.edgepipe}, {found.system}, {libraries}, {found.dtype}. {_predicted_by(found)}",
        "",
        "| figure | measured | predicted | speed |",
        "|---|---|---|---|",
        *(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in figure_lines(found)),
        "",
        f"Kernels: {kernel_line(found)}.",
    ]
    lines += [f"- {kernel.kernel} computes wrong values: {kernel.error:.3g} times its bound." for kernel in found.wrong]
    lines += [f"- {kernel.kernel} cannot run: {kernel.reason}." for kernel in found.missing]
    lines += [f"- {part} was not measured: {reason}." for part, reason in found.failures.items()]
    return "\n".join(lines)


def _predicted_by(found: Measured) -> str:
    said = f"Predicted as {found.sheet}." if found.sheet else "The table of devices lacks this chip."
    return f"{said} Other programs used {found.others_share:.0%} of the processors." if found.busy else said
