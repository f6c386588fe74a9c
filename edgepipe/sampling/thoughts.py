"""Where an output's reasoning ends and its answer begins (PURE)."""

from __future__ import annotations


class Thoughts:
    """Follows one output. It may begin with reasoning, between two marks."""

    def __init__(self, *, opening: str, closing: str) -> None:
        """``opening``: empty if the output begins within reasoning. ``closing``: empty if it has no reasoning."""
        self.over = not closing  # the answer has begun
        self.inside = not opening
        self._opening, self._closing = opening.encode(), closing.encode()
        self._tail = b""  # the end of the output that may be a part of a mark

    def take(self, text: bytes) -> bytes:
        """Append to the output. Return what of it belongs to the answer."""
        if self.over:
            return text
        self._tail += text
        if not self.inside:
            begun = self._tail.lstrip()
            if begun.startswith(self._opening):
                self.inside, self._tail = True, begun[len(self._opening) :]
            elif begun and not self._opening.startswith(begun):
                self.over = True  # the answer begins without reasoning
                return self._tail
            else:
                self._tail = begun
                return b""
        _, mark, answer = self._tail.partition(self._closing)
        self.over = bool(mark)
        self._tail = self._tail[max(0, len(self._tail) - len(self._closing) + 1) :]
        return answer

    def left_to_close(self) -> str:
        """Return what of the closing mark is missing at the output's end."""
        sizes = range(min(len(self._tail), len(self._closing) - 1), 0, -1)
        overlap = next((size for size in sizes if self._tail.endswith(self._closing[:size])), 0)
        return self._closing[overlap:].decode("utf-8", "replace")
