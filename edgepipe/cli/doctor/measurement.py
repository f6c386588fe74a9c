"""What ``edgepipe doctor --measure`` found out about a device, as people and files get it. PURE."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edgepipe.backend.types import KernelError
from edgepipe.planner.device_figures import FIGURES

FORMAT = 1
"""Number of the file's form."""

_PATH = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@~-]+){2,}")
_BUSY = 0.2  # share of all cores; beside more load, figures say little of quieter times


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of one device, with their predictions. Holds no names of people or machines, no addresses, no paths."""

    format: int = FORMAT
    edgepipe: str  # version
    date: str  # UTC, 2026-11-29
    system: str  # "Linux 6.1 x86_64"
    python: str
    backend: str
    device: str  # "cuda:0"
    chip: str  # name that its driver gives it
    dtype: str
    cores: int
    memory_bytes: int  # memory of the device
    libraries: Mapping[str, str]  # versions by name
    others_share: float  # share of the processors that other programs used
    figures: Mapping[str, float]  # keys are those of FIGURES
    predicted: Mapping[str, float]
    sheet: str  # device of the table whose data sheet the predictions follow; empty: none, so nothing is predicted
    kernels: Sequence[KernelError]
    failures: Mapping[str, str] = field(default_factory=dict[str, str])  # reasons by part

    @property
    def wrong(self) -> list[KernelError]:
        """Kernels whose error is above its bound."""
        return [kernel for kernel in self.kernels if not kernel.reason and not kernel.error <= 1]

    @property
    def missing(self) -> list[KernelError]:
        """Kernels that cannot run on the device."""
        return [kernel for kernel in self.kernels if kernel.reason]

    @property
    def busy(self) -> bool:
        """Whether other programs disturbed the figures."""
        return self.others_share > _BUSY

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def measured_from(value: Mapping[str, Any]) -> Measured:
    """Return what a file holds. Raises KeyError, TypeError for one of another form."""
    if value["format"] != FORMAT:
        raise TypeError(f"form {value['format']} instead of {FORMAT}")
    kernels = [KernelError(**each) for each in value["kernels"]]
    given: dict[str, Any] = {**value, "kernels": kernels}
    return Measured(**given)


def without_names(text: str, names: Iterable[str]) -> str:
    """Return the text without the names of this person and machine, and without paths."""
    text = _PATH.sub("PATH", text)
    for name in sorted(filter(None, names), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text)
    return text


def figure_lines(found: Measured) -> list[tuple[str, str, str, str]]:
    """Return the figures with names, values, predictions, and what share of the predicted speed they are."""
    lines: list[tuple[str, str, str, str]] = []
    for key, kind in FIGURES.items():
        if (value := found.figures.get(key)) is None:
            continue
        predicted = found.predicted.get(key)
        share = ""
        if predicted and value:
            share = f"{value / predicted if kind.more_is_better else predicted / value:.2f}x"
        said = "" if predicted is None else f"{_number(predicted)} {kind.unit}"
        lines.append((kind.title, f"{_number(value)} {kind.unit}", said, share))
    return lines


def kernel_line(found: Measured) -> str:
    """Return one sentence about exactness."""
    ran = [kernel for kernel in found.kernels if not kernel.reason]
    if not ran:
        return "no own kernel ran"
    worst = max(ran, key=lambda kernel: kernel.error)
    return f"{len(ran)} kernels compared with float64; largest error {worst.error:.2g} of its bound ({worst.kernel})"


def file_name(found: Measured) -> str:
    """Return a name for the file."""
    chip = re.sub(r"[^a-z0-9]+", "-", f"{found.chip} {found.backend}".lower()).strip("-")
    return f"edgepipe-measured-{chip}-{found.date}.json"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
