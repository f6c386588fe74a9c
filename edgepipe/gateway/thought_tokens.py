"""Counts the tokens of reasoning in an answer (PURE)."""

from __future__ import annotations

from edgepipe.gateway.tool_calls import Scanned


class ThoughtTokens:
    """Counts reasoning tokens of one choice. The marks around reasoning count, too.

    A token whose text no reader has shown yet, such as a part of a mark, counts with what follows, or with the
    reasoning that it ends.
    """

    def __init__(self, *, inside: bool) -> None:
        """``inside``: the prompt has opened the reasoning."""
        self.count = 0
        self._unshown = 0
        self._thinks = inside

    def add(self, scanned: Scanned) -> None:
        """Count a token. ``scanned``: what a reader showed after it."""
        self._unshown += 1
        if scanned.content or scanned.calls:
            self.count += self._unshown - 1 if self._thinks else 0
            self._unshown, self._thinks = 0, False
        elif scanned.reasoning:
            self.count += self._unshown
            self._unshown, self._thinks = 0, True

    def finish(self) -> None:
        """Count the tokens at the end that nothing followed."""
        self.count += self._unshown if self._thinks else 0
        self._unshown = 0
