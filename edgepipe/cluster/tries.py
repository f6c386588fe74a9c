"""Who may still try a pairing code, and when. PURE: addresses and times in, decisions out.

Eight digits can be guessed: three tries for all addresses together leave 3 chances in 100 million per code. Two of the
three are the most that one address may use, so that one machine alone cannot close the window. The 128 bits of a long
string cannot be guessed in any number of tries: there a wrong one costs its address time, and the window stays open.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from edgepipe.errors import EdgepipeError, PairingRejected, QueueFull

MAX_TRIES = 3  # wrong codes of all addresses together, after which a code of eight digits is void
ADDRESS_TRIES = 2  # of them by one address
FREE_FAILURES = 3  # failed exchanges of one address, whatever failed, before it has to wait
_PAUSE_S, _MAX_PAUSE_S = 10.0, 300.0  # doubled with each further failure
_MAX_ADDRESSES = 256  # remembered: a home network has no more; the bound of a code does not depend on it


@dataclass(slots=True)
class _Record:
    """What one address has done."""

    wrong: int = 0
    failures: int = 0
    paused_until_s: float = float("-inf")


class Tries:
    """Counts the tries of one invitation."""

    def __init__(self, *, guessable: bool) -> None:
        """``guessable``: the secret is short, so its tries are bounded."""
        self.left = MAX_TRIES  # never fewer for a long string
        self._guessable = guessable
        self._records: OrderedDict[str, _Record] = OrderedDict()

    @property
    def used_up(self) -> bool:
        """The code is void: nobody may try it any more."""
        return self.left <= 0

    def wrong_from(self) -> list[str]:
        """The addresses that gave a wrong code."""
        return [address for address, record in self._records.items() if record.wrong]

    def refusal(self, address: str, *, now_s: float) -> EdgepipeError | None:
        """Why an address may not try now; None: it may."""
        record = self._records.get(address, _Record())
        if self._guessable and record.wrong >= ADDRESS_TRIES:
            return PairingRejected(
                "this machine has used up its tries",
                fact=f"it gave {record.wrong} wrong codes; the last try is kept for another machine",
                next_step="use the code of a new invitation: edgepipe node invite",
            )
        if now_s < record.paused_until_s:
            return QueueFull(
                "this machine has to wait before it may try again",
                fact=f"{record.failures} attempts failed; it may try again in {record.paused_until_s - now_s:.0f} s",
                next_step="wait, then: edgepipe node join",
            )
        return None

    def failed(self, address: str, *, wrong_code: bool, now_s: float) -> str:
        """Count a failed exchange; what both sides' people should know of it (may be empty)."""
        record = self._records.setdefault(address, _Record())
        self._records.move_to_end(address)
        if len(self._records) > _MAX_ADDRESSES:
            self._records.popitem(last=False)
        record.failures += 1
        record.wrong += wrong_code
        told: list[str] = []
        if wrong_code and self._guessable:
            self.left -= 1
            here = min(self.left, max(0, ADDRESS_TRIES - record.wrong))
            told.append(f"{self.left} {'try' if self.left == 1 else 'tries'} left, {here} of them for {address}")
        if record.failures >= FREE_FAILURES:
            pause_s = min(_PAUSE_S * 2.0 ** (record.failures - FREE_FAILURES), _MAX_PAUSE_S)
            record.paused_until_s = now_s + pause_s
            told.append(f"{address} has to wait {pause_s:.0f} s")
        return "; ".join(told)
