"""A node whose machine can sleep: ``python -m tests.support.faults.chaos.sleepy_node SETTINGS``.

It is the daemon with a clock that adds the seconds that ``note_sleep`` wrote into the node's data directory.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from edgepipe.config import prepare_environment
from edgepipe.system import SystemClock

_SLEPT = "slept_s"


def note_sleep(data_dir: Path, *, seconds: float) -> None:
    """Let the machine of a stopped node have slept so long; the node sees that when it goes on."""
    (data_dir / _SLEPT).write_text(str(_slept_s(data_dir) + seconds))


def _slept_s(data_dir: Path) -> float:
    try:
        return float((data_dir / _SLEPT).read_text())
    except FileNotFoundError:
        return 0.0


def _follow_sleep(data_dir: Path) -> None:
    """Let every clock of this process count what the machine slept."""
    awake_s = SystemClock.boot_s

    def boot_s(self: SystemClock) -> float:
        return awake_s(self) + _slept_s(data_dir)

    SystemClock.boot_s = boot_s


if __name__ == "__main__":
    prepare_environment()
    _follow_sleep(Path(json.loads(sys.argv[1])["data_dir"]))
    runpy.run_module("edgepipe.daemon", run_name="__main__")
