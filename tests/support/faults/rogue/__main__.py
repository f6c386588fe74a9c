"""``python -m tests.support.faults.rogue JSON``: settings as JSON, then the name of an attack per line of standard input.

Writes one line of JSON when it is ready and one after each attack.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from tests.support.faults.rogue.attacks import ATTACKS
from tests.support.faults.rogue.member import Rogue, RogueSettings


async def main() -> None:
    """Attack as told until standard input ends."""
    os.nice(19)  # a rogue has a machine of its own: it takes from the honest nodes what it makes them do, no more
    rogue = Rogue(RogueSettings(**json.loads(sys.argv[1])))
    async with rogue.running():
        _tell({"node_id": rogue.node_id})
        while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
            began_s = time.monotonic()
            complaints = await ATTACKS[name](rogue)
            rogue.behave()
            _tell({"complaints": complaints, "prompts": rogue.prompts, "took_s": time.monotonic() - began_s})


def _tell(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
