"""A stage's compiled grammars by text, bounded in number and bytes. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakSet, WeakValueDictionary

from edgepipe.errors import StepFailed
from edgepipe.sampling.grammar import BuiltGrammar

MAX_KEPT = 64  # grammars that no sequence needs, or refused texts
MAX_KEPT_BYTES = 256 << 20  # size of all kept grammars
MAX_BYTES = 768 << 20  # size of all grammars, kept or used by sequences: three of the largest that a trial allows


@dataclass(frozen=True, slots=True)
class GrammarRefusal:
    """Reason why a text is not compiled."""

    fact: str

    def error(self) -> StepFailed:
        """Return the error for one sequence."""
        return StepFailed(
            "the answer's grammar cannot be used",
            fact=self.fact,
            next_step="send the request with a simpler schema",
        )


class BuiltGrammars:
    """Keeps the grammars that were used last, and knows those that sequences use.

    A grammar's bytes are the memory that the trial measured while it was compiled, an upper bound of what it holds.
    """

    def __init__(
        self, *, max_kept: int = MAX_KEPT, max_kept_bytes: int = MAX_KEPT_BYTES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_kept = max_kept
        self._max_kept_bytes = max_kept_bytes
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, BuiltGrammar] = OrderedDict()  # kept grammars, the last used one last
        # Grammars that are kept or that a sequence uses.
        self._current: WeakValueDictionary[str, BuiltGrammar] = WeakValueDictionary()
        self._alive: WeakSet[BuiltGrammar] = WeakSet()  # the current grammars, and spent ones that a sequence uses
        self._refused: OrderedDict[str, GrammarRefusal] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of all grammars that are kept or used."""
        return sum(built.num_bytes for built in self._alive)

    def find(self, text: str) -> BuiltGrammar | None:
        """Return the compiled grammar; None if the text must be compiled. Raises StepFailed for a refused one."""
        if (refusal := self._refused.get(text)) is not None:
            self._refused.move_to_end(text)
            raise refusal.error()
        built = self._current.get(text)
        if built is None or built.spent:
            self._kept.pop(text, None)
            return None
        self._keep(text, built)
        return built

    def refuse(self, text: str, fact: str) -> StepFailed:
        """Remember that a text is refused. Return the error for its sequence."""
        refusal = self._refused[text] = GrammarRefusal(fact)
        while len(self._refused) > self._max_kept:
            self._refused.popitem(last=False)
        return refusal.error()

    def make_room(self, num_bytes: int) -> None:
        """Drop kept grammars until another one of that size fits. Raises StepFailed if sequences use too much."""
        while self._kept and self.num_bytes + num_bytes > self._max_bytes:
            self._kept.popitem(last=False)
        if (used := self.num_bytes) + num_bytes > self._max_bytes:
            raise StepFailed(
                "the grammars of the running answers take too much memory together",
                fact=f"they take {used >> 20} MiB of the last stage's memory, this one {num_bytes >> 20}; "
                f"{self._max_bytes >> 20} MiB are the most",
                next_step="send the request again later, or with a simpler schema",
            )

    def add(self, text: str, built: BuiltGrammar) -> None:
        """Keep a new grammar."""
        self._current[text] = built
        self._alive.add(built)
        self._keep(text, built)

    def _keep(self, text: str, built: BuiltGrammar) -> None:
        self._kept[text] = built
        self._kept.move_to_end(text)
        while len(self._kept) > self._max_kept or self._kept_bytes() > self._max_kept_bytes:
            self._kept.popitem(last=False)

    def _kept_bytes(self) -> int:
        return sum(built.num_bytes for built in self._kept.values())
