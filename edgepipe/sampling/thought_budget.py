"""A budget of reasoning tokens (PURE): an output that has used it up must close its reasoning.

The budget is the first line of a grammar's text, so that it travels with the grammar and holds where the grammar does.
llguidance's own bound on the tokens of a part ends the part without its closing mark, so it cannot be used here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any, cast

from edgepipe.sampling.thoughts import Thoughts

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
        self._thoughts = Thoughts(opening=budget.opening, closing=budget.closing)
        self._token_bytes = token_bytes
        self._encode = encode

    def fork(self) -> ThoughtMeter:
        """Return a copy that goes on with other tokens."""
        other = copy(self)
        other._thoughts = copy(self._thoughts)
        return other

    def take(self, token: int) -> None:
        """Append a token to the output."""
        if not self._thoughts.over:
            self._left -= self._thoughts.inside
            self._thoughts.take(self._token_bytes[token])

    def must_come(self) -> int | None:
        """Return the token that begins what is left of the closing mark, if the budget is used up."""
        if self._thoughts.over or not self._thoughts.inside or self._left > 0:
            return None
        return next(iter(self._encode(self._thoughts.left_to_close())), None)
