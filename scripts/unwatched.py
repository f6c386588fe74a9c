"""A node without heartbeats, progress reports, hang watch and keepalive: the baseline of ``bench_faults`` alone.

``python scripts/unwatched.py SETTINGS`` is such a daemon on loopback.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial

from edgepipe.config import Timeouts, Watching
from edgepipe.daemon.__main__ import main
from edgepipe.daemon.node import run

NEVER_S = 1e6
QUIET = dataclasses.replace(
    Timeouts.loopback(), beat_interval_s=30.0, tick_s=10.0, dead_min_s=NEVER_S, dead_max_s=NEVER_S, hang_s=NEVER_S
)
OFF = Watching(timeouts=QUIET, hang_check_s=NEVER_S, progress_s=NEVER_S, keepalive=False)

if __name__ == "__main__":
    sys.exit(main(partial(run, watching=OFF)))
