"""One part of ``edgepipe doctor --measure``, in a process of its own: a fault of a kernel ends this part alone.

It reads its settings from standard input as one JSON object. Each line that it prints is one JSON object: the
``profile``, a ``kernel``, the ``figures``, or the ``error`` with which it ended.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from importlib import metadata
from typing import Any

from edgepipe.backend.energy import open_meter
from edgepipe.backend.loader import create_backend
from edgepipe.backend.protocol import Backend, CheckingBackend
from edgepipe.backend.types import BackendOptions, DeviceProfile
from edgepipe.errors import EdgepipeError
from edgepipe.files.strict_json import parse_json_object
from edgepipe.stage.device_measuring import DeviceMeasuring
from edgepipe.system import SystemClock

KERNELS = "kernels"
"""The part that compares kernels with float64; the others are those of ``DeviceMeasuring``."""

PARTS = (KERNELS, "dense", "experts", "recurrent")


def main() -> int:
    """Measure the part and return 0, or 1 with an ``error``."""
    logging.basicConfig(level=logging.ERROR)
    wanted = parse_json_object(sys.stdin.buffer.readline(), what="the settings of a measurement")
    try:
        options = BackendOptions(
            device=wanted["device"], threads=wanted["threads"] or None, settings=dict(wanted["settings"])
        )
        backend = create_backend(wanted["backend"], options)
        profile = backend.profile()
        _say(profile=asdict(profile) | {"libraries": _libraries(wanted["backend"])})
        _measure(backend, profile, wanted["part"])
    except EdgepipeError as error:
        _say(error=error.lines())
        return 1
    return 0


def _measure(backend: Backend, profile: DeviceProfile, part: str) -> None:
    if part != KERNELS:
        measuring = DeviceMeasuring(backend, profile, SystemClock(), open_meter(profile.device))
        _say(figures=measuring.parts()[part]())
        return
    if isinstance(backend, CheckingBackend):
        for found in backend.kernel_errors():
            _say(kernel=asdict(found))


def _libraries(backend: str) -> dict[str, str]:
    """Return the versions of what computes."""
    names = {"torch": ("torch", "llvmlite"), "mlx": ("mlx",)}.get(backend, ())
    found = {name: _version(name) for name in names}
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    return found | ({"cuda": cuda} if isinstance(cuda, str) else {})


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
