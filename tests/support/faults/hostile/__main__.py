"""One case as a process of its own: ``python -m tests.support.faults.hostile PORT KEY CASE``.

It prints ``ready``, waits for a line, asks until the case's time is over, and prints a summary of the answers as JSON.
The process has low priority: the cost of asking belongs to another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys

from tests.support.faults.hostile.cases import HOSTILE_CASES, HostileCase
from tests.support.faults.hostile.user import User


async def struck(case: HostileCase, user: User) -> None:
    """Ask, for as long as the case may take."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(case.seconds):
            await case.strike(user, False)


if __name__ == "__main__":
    port, key, name = sys.argv[1:]
    os.nice(10)
    user = User(port=int(port), key=key)
    case = next(known for known in HOSTILE_CASES if known.name == name)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    asyncio.run(struck(case, user))
    sys.stdout.write(json.dumps(user.summary()) + "\n")
