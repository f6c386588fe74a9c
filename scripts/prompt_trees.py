"""Serves cases with this tree's scheduler and simulator, and with those of the tree before its prompts were pipelined.

A rival is the code as it was, not an option that the tree keeps: git unpacks it into a temporary folder.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from figures import ROOT
from prompt_cases import Case, Served

from edgepipe.backend.devices import named_device, parse_devices

BEFORE = "7aad6b82"
"""The commit whose prompts this bench compares with."""


def serve_here(cases: Sequence[Case]) -> list[Served]:
    """Serve cases with this tree."""
    return _served(ROOT, cases)


def serve_before(cases: Sequence[Case]) -> list[Served]:
    """Serve cases with the tree before, and this tree's constants of devices where all devices of a case are alike.

    Raises RuntimeError where git does not have its commit.
    """
    return _served(tree_before(), [replace(case, device_settings=_constants(case)) for case in cases])


def _constants(case: Case) -> tuple[tuple[str, str], ...]:
    """Return what this tree knows of a case's devices, as settings; empty if they differ."""
    kinds = set(parse_devices(case.devices))
    if len(kinds) > 1:
        return ()
    device = named_device(kinds.pop())
    tiles = device.packed_tile_steps if case.packed else device.tile_steps
    return (
        ("bandwidth", f"{device.bandwidth_bytes_per_s:.0f}"),
        ("flops", f"{device.flops:.0f}"),
        ("step_overhead", f"{1e6 * device.step_overhead_s}us"),
        ("layer_overhead", f"{1e6 * device.layer_overhead_s}us"),
        ("tile_steps", ",".join(f"{tokens}:{factor}" for tokens, factor in tiles)),
    )


@cache
def tree_before() -> Path:
    """Unpack the tree before; the end of the process removes it. Raises RuntimeError where git does not have it."""
    folder = tempfile.TemporaryDirectory(prefix="edgepipe-before-")
    atexit.register(folder.cleanup)
    packed = subprocess.run(["git", "archive", BEFORE, "edgepipe"], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise RuntimeError(f"commit {BEFORE} is missing: fetch the whole history, for example git fetch --unshallow")
    subprocess.run(["tar", "-x", "-C", folder.name], input=packed.stdout, check=True)
    return Path(folder.name)


def _served(tree: Path, cases: Sequence[Case]) -> list[Served]:
    command = [sys.executable, str(ROOT / "scripts" / "prompt_worker.py")]
    lines = "".join(f"{case.to_json()}\n" for case in cases)
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, input=lines, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulation failed:\n{done.stderr}")
    return [Served(*json.loads(line)) for line in done.stdout.splitlines()]
