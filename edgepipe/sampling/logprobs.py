"""Log-probabilities for clients: the model's own, before penalties, bias, masks and temperature."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the token at one position and of the most likely ones. Natural logarithms, at most 0."""

    logprob: float  # score of the actual token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens of one sequence. A prompt's first token has none."""

    position: int  # absolute, of the first token; 1 or more
    tokens: tuple[TokenLogprobs, ...]


class LogprobLog(Sequence[TokenLogprobs]):
    """Log-probabilities of consecutive tokens, stored as numbers: 12 bytes per token and 8 per alternative.

    As objects they would take fifteen times as much. Values are float32, as on the wire. Append-only.
    """

    def __init__(self) -> None:
        self._own = array("f")  # score of each token
        self._ends = array("Q")  # ends of each token's alternatives in the two columns below
        self._top_ids = array("I")
        self._top_values = array("f")

    def append(self, logprobs: TokenLogprobs) -> None:
        """Append one token's log-probabilities."""
        self._own.append(logprobs.logprob)
        for token, value in logprobs.top:
            self._top_ids.append(token)
            self._top_values.append(value)
        self._ends.append(len(self._top_ids))

    def extend(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Append several tokens' log-probabilities."""
        for each in logprobs:
            self.append(each)

    def __len__(self) -> int:
        return len(self._own)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(index, slice):
            return [self._at(each) for each in range(*index.indices(len(self)))]
        return self._at(range(len(self))[index])

    def _at(self, index: int) -> TokenLogprobs:
        start, end = self._ends[index - 1] if index else 0, self._ends[index]
        top = zip(self._top_ids[start:end], self._top_values[start:end], strict=True)
        return TokenLogprobs(self._own[index], tuple(top))


def logprob_bytes(num_top: int) -> int:
    """Return a LogprobLog's bytes for a token with ``num_top`` alternatives; arrays grow by an eighth in advance."""
    return (12 + 8 * num_top) * 9 // 8
