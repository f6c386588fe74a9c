"""A node for programs: ``python -m edgepipe.daemon '{"port": 0, ...}'``, settings as JSON.

Writes one line of JSON to standard output once it is ready, or three lines to standard error if it cannot start. People
use ``edgepipe node start``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from edgepipe.config import Config, load_config
from edgepipe.daemon.node import NodeReady, OnReady, run, start_nursery
from edgepipe.daemon.processes.nursery import Nursery
from edgepipe.errors import EdgepipeError


def main(run: Callable[[Config, OnReady, Nursery | None], None] = run) -> int:
    """Run until stopped; return the error's exit status."""
    nursery = start_nursery()
    try:
        flags: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
        run(load_config(flags).values, _tell, nursery)
    except EdgepipeError as error:
        sys.stderr.write("\n".join(error.lines()) + "\n")
        return error.exit_code
    return 0


def _tell(ready: NodeReady) -> None:
    sys.stdout.write(json.dumps(asdict(ready), default=str) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
