"""Content of an answer that may have calls behind it."""

from __future__ import annotations


class AnswerContent:
    """Text outside calls, as it is read. Holds back spaces at its end, which a call behind them drops."""

    def __init__(self) -> None:
        self._shown: list[str] = []
        self._spaces: list[str] = []

    def add(self, text: str) -> None:
        """Add text, and hold back spaces at its end."""
        shown = text.rstrip()
        if shown:
            self._shown += [*self._spaces, shown]
            self._spaces = []
        if len(shown) < len(text):
            self._spaces.append(text[len(shown) :])

    def drop_spaces(self) -> None:
        """Forget the spaces that are held back."""
        self._spaces = []

    def end(self, *, keep_spaces: bool) -> None:
        """Show or drop the spaces that are held back, because nothing follows."""
        if keep_spaces:
            self._shown += self._spaces
        self._spaces = []

    def take(self) -> str:
        """Return what was added since the last call, without the spaces that are held back."""
        text, self._shown = "".join(self._shown), []
        return text
