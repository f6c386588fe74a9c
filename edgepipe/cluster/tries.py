"""Limits the attempts with a pairing code. PURE: addresses and times in, decisions out.

Eight digits can be guessed: three tries by all addresses together leave 3 chances in 100 million per code. One address
may use at most two of the three, so that one machine alone cannot close the window. The 128 bits of a long string
cannot be guessed in any number of tries. There a wrong try costs its address time, and the window stays open.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from edgepipe.errors import EdgepipeError, PairingRejected, QueueFull

MAX_TRIES = 3  # wrong codes by all addresses together; then a code of eight digits is void
ADDRESS_TRIES = 2  # wrong codes by one address
FREE_FAILURES = 3  # failed exchanges of one address, for any reason, before it has to wait
_PAUSE_S, _MAX_PAUSE_S = 10.0, 300.0  # pause after a failure, doubled with each further one, and its limit
_MAX_ADDRESSES = 256  # remembered: a home network has no more; a code's limit does not depend on it


@dataclass(slots=True)
class _Record:
    """The attempts of one address."""

    wrong: int = 0
    failures: int = 0
    paused_until_s: float = float("-inf")


class Tries:
    """Counts the attempts with one invitation."""

    def __init__(self, *, guessable: bool) -> None:
        """``guessable``: the secret is short, so its tries are limited."""
        self.left = MAX_TRIES  # stays the same for a long string
        self._guessable = guessable
        self._records: OrderedDict[str, _Record] = OrderedDict()

    @property
    def used_up(self) -> bool:
        """Whether the code is void: no machine may try it any more."""
        return self.left <= 0

    def wrong_from(self) -> list[str]:
        """Return the addresses that gave a wrong code."""
        return [address for address, record in self._records.items() if record.wrong]

    def refusal(self, address: str, *, now_s: float) -> EdgepipeError | None:
        """Return why an address may not try now; None if it may."""
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
                next_step="wait, then: edgepipe node join CODE",
            )
        return None

    def failed(self, address: str, *, wrong_code: bool, now_s: float) -> str:
        """Count a failed exchange. Return what people at both sides should know of it (may be empty)."""
        record = self._records.setdefault(address, _Record())
        self._records.move_to_end(address)
        if len(self._records) > _MAX_ADDRESSES:
            self._records.popitem(last=False)
        record.failures += 1
        record.wrong += wrong_code
        notes: list[str] = []
        if wrong_code and self._guessable:
            self.left -= 1
            own_left = min(self.left, max(0, ADDRESS_TRIES - record.wrong))
            notes.append(f"{self.left} {'try' if self.left == 1 else 'tries'} left, {own_left} of them for {address}")
        if record.failures >= FREE_FAILURES:
            pause_s = min(_PAUSE_S * 2.0 ** (record.failures - FREE_FAILURES), _MAX_PAUSE_S)
            record.paused_until_s = now_s + pause_s
            notes.append(f"{address} has to wait {pause_s:.0f} s")
        return "; ".join(notes)
