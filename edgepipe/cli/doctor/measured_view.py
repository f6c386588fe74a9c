"""Shows a measurement of this machine, and writes its file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgepipe.cli.options import DEGRADED_EXIT
from edgepipe.cli.output import make_console, make_table, print_json, say
from edgepipe.errors import ConfigInvalid
from edgepipe.interrupts import run_interruptible
from edgepipe.plain_words import plain
from edgepipe.safe_text import json_text, one_line
from edgepipe.units import format_bytes

if TYPE_CHECKING:
    from edgepipe.cli.doctor.measurement import Measured
    from edgepipe.config import Config


def measure_here(config: Config, *, as_json: bool, output: Path | None) -> None:
    """Measure the device, show the figures, write the file unless JSON goes to standard output.

    Exits with code 8 if a kernel computes wrong values or cannot run, or a part failed.
    """
    from edgepipe.cli.doctor.measurement import file_name
    from edgepipe.cli.doctor.measuring import measure

    found = run_interruptible(measure(config, _progress))
    if as_json:
        print_json(found.as_json())
    else:
        _show(found)
    if output is not None or not as_json:
        file = output or Path(file_name(found))
        _write(file, found)
        if not as_json:
            say(f"\nWrote {file}. It names the chip and the versions, no person, machine, address or path.")
    if found.wrong or found.missing or found.failures:
        raise typer.Exit(DEGRADED_EXIT)


def _show(found: Measured) -> None:
    from edgepipe.cli.doctor.measurement import figure_lines, kernel_line

    versions = ", ".join(f"{name} {version}" for name, version in found.libraries.items())
    say(f"{found.chip} · {format_bytes(found.memory_bytes)} · {found.dtype} · {versions}\n")
    table = make_table("FIGURE", "MEASURED", "PREDICTED", "SPEED", right=("MEASURED", "PREDICTED", "SPEED"))
    for line in figure_lines(found):
        table.add_row(*line)
    make_console().print(table)
    print()
    say(kernel_line(found))
    for kernel in found.wrong:
        say(f"✗ {kernel.kernel} computes wrong values: {kernel.error:.3g} times its bound")
    for kernel in found.missing:
        say(f"! {kernel.kernel} cannot run here: {one_line(kernel.reason)}")
    for part, reason in found.failures.items():
        say(f"✗ {part} was not measured: {one_line(reason)}")
    if not found.sheet:
        say("Nothing is predicted: the table of devices lacks this chip.")
    elif found.device == "cpu":
        say(f"Predictions are for a desktop's processor of as many cores ({found.sheet}).")
    if found.busy:
        say(f"Other programs used {found.others_share:.0%} of the processors: the device may be faster than this.")


def _write(file: Path, found: Measured) -> None:
    """Write the file. Raises ConfigInvalid if that fails."""
    try:
        file.write_text(json_text(found.as_json()) + "\n", encoding="utf-8")
    except OSError as exc:
        raise ConfigInvalid(
            f"cannot write {file}", fact=plain(exc), next_step="edgepipe doctor --measure --output FILE"
        ) from exc


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
