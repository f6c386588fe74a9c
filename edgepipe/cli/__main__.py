"""``python -m edgepipe.cli``: the same as ``edgepipe``. Imports late, so that ^C during imports prints no traceback."""

from __future__ import annotations

import sys
from typing import NoReturn


def start() -> NoReturn:
    """Run the command line of this process."""
    try:
        from edgepipe.config import prepare_environment
        from edgepipe.interrupts import keep_interrupts

        keep_interrupts()
        prepare_environment()  # gRPC reads its settings when it is imported
        from edgepipe.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    start()
