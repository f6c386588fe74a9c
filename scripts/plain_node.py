"""``edgepipe`` with nodes that do not encrypt, to measure what encryption costs: ``plain_node.py node start ...``."""

from __future__ import annotations

from functools import partial

from edgepipe.cli.__main__ import start
from edgepipe.config import prepare_environment

prepare_environment()

from edgepipe.daemon import node  # noqa: E402

if __name__ == "__main__":
    node.run = partial(node.run, encrypted=False)
    start()
