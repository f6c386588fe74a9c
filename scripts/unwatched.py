"""A node without heartbeats, progress reports, hang watch and keepalive: the baseline of ``bench_faults`` alone.

``python scripts/unwatched.py SETTINGS`` is such a daemon; its children come through here, too.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys

from edgepipe import config
from edgepipe.config import prepare_environment

prepare_environment()

from edgepipe.daemon.processes import children  # noqa: E402
from edgepipe.link import channels  # noqa: E402
from edgepipe.workers import progress as child_progress  # noqa: E402

NEVER_S = 1e6


def switch_off() -> None:
    """Everything that only watches."""
    quiet = {"beat_interval_s": 30.0, "tick_s": 10.0, "dead_min_s": NEVER_S, "dead_max_s": NEVER_S, "hang_s": NEVER_S}
    for profile in ("loopback", "lan", "wifi"):
        made = getattr(config.Timeouts, profile)()
        setattr(config.Timeouts, profile, staticmethod(lambda made=made: dataclasses.replace(made, **quiet)))
    child_progress._BUSY_S = NEVER_S
    children._LOOK_S = NEVER_S
    for name in ("_COMMON_OPTIONS", "_CHANNEL_OPTIONS", "_SERVER_OPTIONS"):
        options = getattr(channels, name)
        setattr(channels, name, [one for one in options if "keepalive" not in one[0]])
    children._MAIN = (os.path.abspath(__file__),)


if __name__ == "__main__":
    switch_off()
    if sys.argv[1] in ("stage", "engine", "gateway"):
        runpy.run_module("edgepipe.workers.main", run_name="__main__")
    else:
        runpy.run_module("edgepipe.daemon", run_name="__main__")
