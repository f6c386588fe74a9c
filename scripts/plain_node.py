"""A node that does not encrypt, to measure what encryption costs: ``plain_node.py '{"port": 0, ...}'``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from edgepipe.config import load_config
from edgepipe.daemon.node import NodeReady, run


def _tell(ready: NodeReady) -> None:
    print(json.dumps(asdict(ready), default=str, indent=2), flush=True)


if __name__ == "__main__":
    run(load_config(json.loads(sys.argv[1])).values, on_ready=_tell, encrypted=False)
