"""Runs the parts of ``edgepipe doctor --measure``, each in a process of its own."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from edgepipe import __version__
from edgepipe.backend.devices import DeviceModel, named_device, reported_device
from edgepipe.backend.types import KernelError
from edgepipe.cli.doctor.measure_part import PARTS
from edgepipe.cli.doctor.measurement import Measured, without_names
from edgepipe.config import Config
from edgepipe.daemon.machine.backends import NONE, choose_backend
from edgepipe.daemon.machine.machine_load import others_share, processor_times
from edgepipe.errors import BackendUnavailable
from edgepipe.planner.device_figures import predicted_figures

_WHOLE_S = 290.0  # bound on all parts together
_LINE_BYTES = 1 << 20


async def measure(config: Config, say: Callable[[str], None]) -> Measured:
    """Measure this machine's device. ``say`` gets a line of progress. Raises BackendUnavailable, ConfigInvalid."""
    await _refuse_beside_models(config)
    backend = choose_backend(config.backend)
    if backend == NONE:
        raise BackendUnavailable(
            "this installation computes nothing",
            fact="neither torch nor mlx is installed",
            next_step="edgepipe update --extra torch, or --extra mlx on a Mac",
        )
    settings = {
        "backend": backend,
        "device": config.device,
        "threads": config.threads,
        "settings": dict(option.split("=", 1) for option in config.backend_options),
    }
    names = _own_names()
    profile: dict[str, Any] = {}
    figures: dict[str, float] = {}
    kernels: list[KernelError] = []
    failures: dict[str, str] = {}
    shares: list[float] = []
    begun_s = time.monotonic()
    for number, part in enumerate(PARTS, 1):
        say(f"measuring {part} ({number} of {len(PARTS)})")
        left_s = _WHOLE_S - (time.monotonic() - begun_s)
        lines, failure, share = await _run_part({**settings, "part": part}, left_s)
        shares.append(share)
        for line in lines:
            profile = profile or line.get("profile", {})
            figures |= line.get("figures", {})
            if "kernel" in line:
                found = KernelError(**line["kernel"])
                kernels.append(
                    KernelError(kernel=found.kernel, error=found.error, reason=without_names(found.reason, names))
                )
        if failure:
            failures[part] = without_names(failure, names)
    if not profile:
        raise BackendUnavailable("the device cannot be measured", fact="; ".join(failures.values()))
    device = _sheet(profile)
    predicted = predicted_figures(device, packing=profile["packing"], dtype=profile["compute_dtype"]) if device else {}
    return Measured(
        edgepipe=__version__,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        system=f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        python=platform.python_version(),
        backend=backend,
        device=profile["device"],
        chip=profile["name"],
        dtype=profile["compute_dtype"],
        cores=psutil.cpu_count(logical=False) or os.cpu_count() or 0,
        memory_bytes=profile["memory_total_bytes"],
        libraries=profile["libraries"],
        others_share=round(max(shares), 2),
        figures={key: float(f"{value:.4g}") for key, value in figures.items()},
        predicted={key: float(f"{value:.4g}") for key, value in predicted.items() if key in figures},
        sheet=device.name if device else "",
        kernels=kernels,
        failures=failures,
    )


async def _refuse_beside_models(config: Config) -> None:
    """Raise BackendUnavailable if this machine's node computes for a model: its steps would distort the figures."""
    from edgepipe.cli.admin import status_if_running

    status = await status_if_running(config.data_dir)
    own = next((member for member in status.members if member.self), None) if status is not None else None
    if own is not None and any(device.state in ("loading", "serving") for device in own.node.devices):
        raise BackendUnavailable(
            "this machine computes for a model, whose steps would distort the figures",
            next_step="edgepipe ps, then edgepipe stop MODEL",
        )


async def _run_part(wanted: Mapping[str, Any], limit_s: float) -> tuple[list[dict[str, Any]], str, float]:
    """Run one part. Return its lines, why it failed, and the share of the processors that others used."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "edgepipe.cli.doctor.measure_part",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
    )
    lines: list[dict[str, Any]] = []
    failure, before = "", processor_times(process.pid)
    after = before
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read(), name="errors of a part")
    try:
        async with asyncio.timeout(max(1.0, limit_s)):
            process.stdin.write(json.dumps(wanted).encode() + b"\n")
            process.stdin.close()
            async for line in process.stdout:
                after = processor_times(process.pid)
                if line.startswith(b'{"'):
                    lines.append(json.loads(line))
            await process.wait()
            failure = _failure(lines, process.returncode or 0, await errors)
    except TimeoutError:
        failure = f"it was not done within {limit_s:.0f} s"
    finally:
        errors.cancel()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return lines, failure, others_share(before, after)


def _failure(lines: list[dict[str, Any]], code: int, errors: bytes) -> str:
    """Return why a part failed; empty if it did not."""
    if not code:
        return ""
    told = next((line["error"] for line in lines if "error" in line), None)
    if told is not None:
        return "; ".join(told)
    last = errors.decode(errors="replace").strip().splitlines()[-1:]
    return "; ".join([f"its process ended with {code}", *last])


def _sheet(profile: Mapping[str, Any]) -> DeviceModel | None:
    """Return the data sheet that predicts the device; of a processor that of its number of cores."""
    if (found := reported_device(profile["name"])) is not None or profile["device"] != "cpu":
        return found
    return named_device(f"cpu {psutil.cpu_count(logical=False) or 1} cores")


def _own_names() -> list[str]:
    """Return the names of this person and machine."""
    with suppress(OSError, KeyError):
        return [str(Path.home()), getpass.getuser(), socket.gethostname(), platform.node()]
    return [str(Path.home())]
