"""Drafts by lookup: what followed the sequence's last tokens when they stood before, in its prompt or its answer.

The longest end of the sequence that occurred before decides. Where that end occurred several times, each draft is the
token that followed most often, the latest of equals. So the drafts are those of a suffix automaton. No index is kept:
the search compares the last token with all others, which takes 40 us for 100,000 tokens, and then only the places that
are left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgepipe.backend.drafting import MOST_DRAFTS, NO_DRAFTS, Drafts, DraftSource

_LEAST_MATCH = 2  # one equal token says little
_MOST_MATCH = 16  # longer ends hardly differ in what follows
_CLASSES = ((8, DraftSource.LOOKUP_LONG), (4, DraftSource.LOOKUP), (0, DraftSource.LOOKUP_SHORT))

_Places = npt.NDArray[np.int64]
_NOWHERE: _Places = np.zeros(0, np.int64)


class LookupDrafter:
    """See ``Drafter``."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._count = len(tokens)
        self._tokens = np.zeros(max(256, 2 * len(tokens)) + MOST_DRAFTS, np.int32)
        self._tokens[: len(tokens)] = tokens

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        """See ``Drafter.propose``."""
        self._append(tokens)
        places, match = self._matches() if count > 0 else (_NOWHERE, 0)
        if match < _LEAST_MATCH:
            return NO_DRAFTS
        source = next(source for least, source in _CLASSES if match >= least)
        ids = tuple(self._follow(places, min(count, MOST_DRAFTS)))
        return Drafts(ids, (source,) * len(ids))

    def _append(self, tokens: Sequence[int]) -> None:
        end = self._count + len(tokens)
        if end + MOST_DRAFTS > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(end + MOST_DRAFTS, np.int32)])
        self._tokens[self._count : end] = tokens
        self._count = end

    def _matches(self) -> tuple[_Places, int]:
        """Return the places behind earlier occurrences of the longest end, ascending, and that end's length."""
        known, length = self._tokens[: self._count], 0
        places = _NOWHERE
        while length < min(_MOST_MATCH, self._count - 1):
            last = known[-1 - length]
            left = np.flatnonzero(known[:-1] == last) + 1 if not length else places[places > length]
            if length:
                left = left[known[left - 1 - length] == last]
            if not len(left):
                break
            places, length = left, length + 1
        return places, length

    def _follow(self, places: _Places, count: int) -> list[int]:
        """Return the tokens that followed most often. A place may reach into the drafts themselves: text repeats."""
        drafts: list[int] = []
        for at in range(count):
            following = self._tokens[places + at]
            values, first, times = np.unique(following[::-1], return_index=True, return_counts=True)
            most = times == times.max()
            token = int(values[most][first[most].argmin()])  # the array is reversed: the lowest index is the latest
            self._tokens[self._count + at] = token
            drafts.append(token)
            places = places[following == token]
        return drafts
