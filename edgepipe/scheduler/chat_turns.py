"""How much longer the turns of chats take beside batches than alone, as measured, and what batches may do then.

Forecasts know what stages and links do. They do not know what a step costs the hosts: gateways, engine and event loops
that share processors take longer for the rows of a batch, too.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

_MEASURED = 9  # turns whose median counts: a pause of the machine is not what batches cost
_LARGEST_CHANGE = 2.0  # factor between two shares
_LEAST_SHARE = 0.3  # what is below gains chats little: each step costs a fixed time
_LEAST_S = 1e-6  # shortest turn that counts


class ChatTurns:
    """Measures turns of chats and adapts the share of the forecast work that batches may do beside them.

    Pure: the caller tells the time.
    """

    def __init__(self, most: float) -> None:
        """``most``: turn of chats beside batches, as a multiple of their turn alone."""
        self._most = most
        self._alone: deque[float] = deque(maxlen=_MEASURED)  # newest turns without batches, s
        self._beside: list[float] = []  # turns since the last change, s
        self.share = 1.0
        """Part of the rows and prompt tokens that the forecast allows batches."""

    def alone(self, turn_s: float, more_s: float = 0.0) -> None:
        """Record a turn without batches. ``more_s``: by forecast, the time that it takes longer than the last one."""
        if more_s:
            self._alone = deque([each + more_s for each in self._alone], maxlen=_MEASURED)
        self._alone.append(turn_s)

    def beside(self, turn_s: float, more_s: float = 0.0) -> bool:
        """Record a turn beside batches.

        ``more_s``: by forecast, the time that it would take longer than the last one without batches if there were none
        now. Returns whether the share has changed. It stays as it is until a turn alone has been measured.
        """
        if not self._alone:
            return False
        self._beside.append(turn_s)
        if len(self._beside) < _MEASURED:
            return False
        ratio = median_low(self._beside) / max(median_low(self._alone) + more_s, _LEAST_S)
        self._beside.clear()
        # What is above the turn alone grows with the share; half of the way is gone at a time, since turns vary.
        wanted = ((self._most - 1) / max(ratio - 1, 1e-3)) ** 0.5
        change = min(max(wanted, 1 / _LARGEST_CHANGE), _LARGEST_CHANGE)
        before, self.share = self.share, min(max(self.share * change, _LEAST_SHARE), 1.0)
        return self.share != before
