"""Drafts by lookup: what followed the longest end of the sequence that it has twice."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.backend.drafting import MOST_DRAFTS, DraftSource
from edgepipe.sampling.lookup import LookupDrafter


def naive(tokens: list[int], count: int) -> list[int]:
    """The same by comparing everything with everything."""
    best, places = 0, list[int]()
    for place in range(1, len(tokens)):
        match = 0
        while match < min(16, place) and tokens[place - 1 - match] == tokens[-1 - match]:
            match += 1
        if match > best:
            best, places = match, []
        if match == best:
            places.append(place)
    if best < 2:
        return []
    text = list(tokens)
    for at in range(count):
        following = [text[place + at] for place in places]
        counts = Counter(following)
        most = max(counts.values())
        token = next(each for each in reversed(following) if counts[each] == most)
        text.append(token)
        places = [place for place in places if text[place + at] == token]
    return text[len(tokens) :]


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    parts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=40),
    count=st.integers(1, MOST_DRAFTS),
)
def test_the_longest_match_decides(prompt: list[int], parts: list[list[int]], count: int) -> None:
    drafter = LookupDrafter(prompt)
    tokens = list(prompt)
    for part in parts:
        tokens += part
        assert list(drafter.propose(part, count).ids) == naive(tokens, count)


def test_the_source_tells_how_long_the_match_is() -> None:
    text = list(range(100, 120))
    for length, source in ((3, DraftSource.LOOKUP_SHORT), (5, DraftSource.LOOKUP), (9, DraftSource.LOOKUP_LONG)):
        drafts = LookupDrafter([*text, 7]).propose(text[:length], 3)
        assert drafts.ids == tuple(text[length : length + 3])
        assert drafts.sources == (source,) * 3


def test_a_text_that_repeats_goes_on_repeating() -> None:
    assert LookupDrafter([1, 2, 3, 1, 2, 3, 1]).propose([2], 7).ids == (3, 1, 2, 3, 1, 2, 3)


def test_new_text_gets_no_drafts() -> None:
    drafter = LookupDrafter(range(1000))
    assert drafter.propose([2000], 5).ids == ()
    assert drafter.propose([5], 5).ids == (), "one equal token says little"
    assert drafter.propose([6], 0).ids == ()
