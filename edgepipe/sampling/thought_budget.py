"""A budget of reasoning tokens (PURE): an output that has used it up must close its reasoning.

The budget is the first line of a grammar's text, so that it travels with the grammar and holds where the grammar does.
llguidance's own bound on the tokens of a part ends the part without its closing mark, so it cannot be used here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

_HEADER = "%reasoning "
_MAX_MARK_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtBudget:
    """How many tokens of reasoning an output may have, and the marks around reasoning."""

    most_tokens: int
    opening: str  # empty: the output begins within reasoning
    closing: str

    def header(self) -> str:
        """Return the line before the text of a grammar."""
        return f"{_HEADER}{json.dumps(asdict(self))}\n"


def split_budget(text: str) -> tuple[ThoughtBudget | None, str]:
    """Return the budget of a grammar's text, and the rest. Raises ValueError for a malformed header."""
    if not text.startswith(_HEADER):
        return None, text
    line, _, rest = text.removeprefix(_HEADER).partition("\n")
    value: object = json.loads(line)
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else dict[str, Any]()
    most, marks = fields.get("most_tokens"), [fields.get("opening"), fields.get("closing")]
    if type(most) is not int or most < 0 or not marks[1]:
        raise ValueError("the budget of reasoning is malformed")
    if not all(isinstance(mark, str) and len(mark) <= _MAX_MARK_CHARS for mark in marks):
        raise ValueError("the marks of reasoning are malformed")
    return ThoughtBudget(most_tokens=most, opening=str(marks[0]), closing=str(marks[1])), rest


class ThoughtMeter:
    """Follows one output's reasoning: a function of the tokens taken."""

    def __init__(
        self, budget: ThoughtBudget, *, token_bytes: Sequence[bytes], encode: Callable[[str], list[int]]
    ) -> None:
        """
        token_bytes  [V] bytes of each id
        encode       the model's tokenizer
        """
        self._left = budget.most_tokens
        self._opening = budget.opening.encode()
        self._closing = budget.closing.encode()
        self._token_bytes = token_bytes
        self._encode = encode
        self._tail = b""  # the end of the output that may be a part of a mark
        self._inside = not self._opening
        self._over = False

    def take(self, token: int) -> None:
        """Append a token to the output."""
        if self._over:
            return
        self._tail += self._token_bytes[token]
        if not self._inside:
            self._look_for_opening()
            return
        self._left -= 1
        self._look_for_closing()

    def must_come(self) -> int | None:
        """Return the token that begins what is left of the closing mark, if the budget is used up."""
        if self._over or not self._inside or self._left > 0:
            return None
        rest = self._closing[self._overlap() :].decode("utf-8", "replace")
        return next(iter(self._encode(rest)), None)

    def _look_for_opening(self) -> None:
        text = self._tail.lstrip()
        if text.startswith(self._opening):
            self._inside, self._tail = True, text[len(self._opening) :]
            self._look_for_closing()
        elif text and not self._opening.startswith(text):
            self._over = True  # the answer begins without reasoning
        else:
            self._tail = text

    def _look_for_closing(self) -> None:
        self._over = self._closing in self._tail
        self._tail = self._tail[max(0, len(self._tail) - len(self._closing) + 1) :]

    def _overlap(self) -> int:
        """Return how many bytes of the closing mark the output ends with."""
        sizes = range(min(len(self._tail), len(self._closing) - 1), 0, -1)
        return next((size for size in sizes if self._tail.endswith(self._closing[:size])), 0)
