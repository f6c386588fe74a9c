"""Part ``heal`` of ``scripts/bench faults``: seconds until a client is served again after faults that once lasted.

Each row is the worst of some strikes; faults that leave a pause before the next try are struck once per cluster. A
fault that is not healed within the bar counts as the bar, with what was still wrong on standard error. The catalogue
has the figures that were predicted before they were measured.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

import httpx
import psutil
from figures import Row, below

from edgepipe.errors import EdgepipeError
from tests.support.faults.chaos.catalogue import LASTING_FAULTS, LastingFault
from tests.support.faults.chaos.clients import HEAL_S, Clients
from tests.support.network.lan import lan_available


async def healed(full: bool) -> list[Row]:
    """Strike with every fault, in full with the long ones too, and five times each."""
    lan = lan_available()
    wanted = [one for one in LASTING_FAULTS if full or not one.is_long]
    rows: list[Row] = []
    for fault in [one for one in wanted if one.needs_lan and not lan]:
        _say(f"left out: {fault.what}: {lan.reason}")
    able = [one for one in wanted if lan or not one.needs_lan]
    for _, same in itertools.groupby(able, key=lambda fault: fault.cluster):
        faults = list(same)
        while faults:  # a cluster that was not healed is followed by a new one
            with tempfile.TemporaryDirectory(prefix="edgepipe-heal-") as place:
                async with faults[0].cluster(Path(place)) as clients:
                    met: bool | None = True
                    while faults and met:
                        found = await _rows(faults.pop(0), clients, times=5 if full else 1)
                        met = found[0].met
                        rows += found
    return rows


async def _rows(fault: LastingFault, clients: Clients, *, times: int) -> list[Row]:
    """The worst of some strikes, and the longest pause of a chat beside them where that is asked for."""
    _say(f"time to heal: {fault.what}")
    began_s = clients.now_s()
    try:
        taken = [await fault.strike(clients) for _ in range(1 if fault.strikes_once else times)]
    except (EdgepipeError, AssertionError, TimeoutError, psutil.Error, httpx.HTTPError, OSError) as error:
        _say(f"not healed: {str(error)[:2000]}")
        return [Row(f"{fault.what}: not healed", HEAL_S, "s", target=f"<= {HEAL_S:g} s", met=False)]
    spread = f", worst of {len(taken)} (from {min(taken):.1f} s)" if len(taken) > 1 else ""
    rows = [below(f"{fault.what}{spread}", max(taken), "s", HEAL_S)]
    if fault.predicted_s is not None:
        rows[0] = rows[0]._replace(baseline=fault.predicted_s, baseline_name="predicted")
    if fault.shows_pause:
        history = clients.history
        pauses = [history.stall_s(stream, since_s=began_s) for stream in history.streams()]
        rows.append(below("  longest pause of a chat beside it", max(one or 0.0 for one in pauses), "s", HEAL_S))
    return rows


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
