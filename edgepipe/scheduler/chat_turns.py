"""How much longer the turns of chats take beside batches than alone, as measured, and what batches may do then.

Forecasts know what stages and links do. They do not know what a step costs the hosts: gateways, engine and event loops
that share processors take longer for the rows of a batch, too.
"""

from __future__ import annotations

_SMOOTHING = 0.2  # share of each turn in the mean of turns alone
_OUTLIER = 4.0  # a longer turn counts as so many times the mean: a pause of the machine is not what batches cost
_MEASURED = 8  # turns beside batches between two changes of the share
_LARGEST_CHANGE = 2.0  # factor between two shares
_LEAST_SHARE = 0.1


class ChatTurns:
    """Measures turns of chats and adapts the share of the forecast work that batches may do beside them.

    Pure: the caller tells the time.
    """

    def __init__(self, most: float) -> None:
        """``most``: turn of chats beside batches, as a multiple of their turn alone."""
        self._most = most
        self._alone_s = 0.0  # mean of measured turns without batches; 0: none yet
        self._expected_s = 0.0  # what stages and links take of them by the forecast
        self._beside_s = 0.0  # sum of the turns since the last change
        self._count = 0
        self.share = 1.0
        """Part of the rows and prompt tokens that the forecast allows batches."""

    def alone(self, turn_s: float, expected_s: float) -> None:
        """Record a turn without batches, of which stages and links take ``expected_s``."""
        if not self._alone_s:
            self._alone_s, self._expected_s = turn_s, expected_s
            return
        turn_s = min(turn_s, _OUTLIER * self._alone_s)
        self._alone_s += _SMOOTHING * (turn_s - self._alone_s)
        self._expected_s += _SMOOTHING * (expected_s - self._expected_s)

    def beside(self, turn_s: float, expected_s: float) -> bool:
        """Record a turn beside batches; alone, stages and links would take ``expected_s`` of it.

        Returns whether the share has changed. It stays as it is until a turn alone has been measured.
        """
        if not self._alone_s:
            return False
        alone_s = max(self._alone_s + expected_s - self._expected_s, expected_s, 1e-6)
        self._beside_s += min(turn_s, _OUTLIER * alone_s)
        self._count += 1
        if self._count < _MEASURED:
            return False
        ratio = self._beside_s / self._count / alone_s
        self._beside_s, self._count = 0.0, 0
        # What is above the turn alone grows with the share; half of the way is gone at a time, since turns vary.
        wanted = ((self._most - 1) / max(ratio - 1, 1e-3)) ** 0.5
        change = min(max(wanted, 1 / _LARGEST_CHANGE), _LARGEST_CHANGE)
        before, self.share = self.share, min(max(self.share * change, _LEAST_SHARE), 1.0)
        return self.share != before
