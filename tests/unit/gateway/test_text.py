"""What a client sees is a function of (request, log), however the tokens were grouped and the text was cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import RemoteProtocolError
from edgepipe.gateway.log import RequestLog
from edgepipe.gateway.text import ChoiceText, StopMatcher
from edgepipe.sampling import SamplingParams, TokenLogprobs
from tests.support.gateways.fake_engine import ByteDetokenizer

ALPHABET = st.sampled_from("ab€")
TEXTS = st.text(ALPHABET, max_size=24)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str]:
    """Read character by character; the first moment at which the text ends with a stop string ends it."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return text[: end - len(stop)], stop
    return text, ""


@st.composite
def pieces(draw: st.DrawFn, whole: str) -> list[str]:
    """A text in pieces, cut anywhere."""
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    edges = [0, *cuts, len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(edges)]


@given(st.data(), TEXTS, STOPS)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(data: st.DataObject, text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, stopped = "", ""
    for piece in data.draw(pieces(text)):
        part, stopped = matcher.push(piece)
        shown += part
        if stopped:
            break
    if not stopped:
        shown += matcher.finish()[0]
    assert (shown, stopped) == reference(text, stops)


@given(st.data(), TEXTS, STOPS)
def test_grouping_tokens_differently_changes_nothing(data: st.DataObject, text: str, stops: list[str]) -> None:
    ids = list(text.encode())
    whole = _run(ids, stops, [len(ids)])
    groups = data.draw(st.lists(st.integers(1, 5), min_size=len(ids), max_size=len(ids)))
    assert _run(ids, stops, groups) == whole
    assert whole[0] == reference(text, stops)[0]


def _run(ids: list[int], stops: list[str], groups: list[int]) -> tuple[str, tuple[int, ...], str | None, int]:
    """Text, ids, finish reason and count of a choice whose tokens come in such groups."""
    choice = ChoiceText(0, new_detokenizer=ByteDetokenizer, stops=StopMatcher(stops), stop_token_ids=frozenset())
    text, seen, reason, start = "", (), None, 0
    for size in [*groups, 0]:
        group = ids[start : start + size]
        start += len(group)
        delta = choice.advance(group, "length" if start == len(ids) else None)
        text, seen, reason = text + delta.text, seen + delta.ids, delta.finish_reason
        if choice.finished:
            break
    return text, seen, reason, choice.num_tokens


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a ST") == ("a ", "")
    assert matcher.push("A S") == ("STA ", "")
    assert matcher.push("TOPx") == ("", "STOP")


def test_a_character_cut_by_the_token_limit_is_shown_as_well_as_it_can_be() -> None:
    choice = ChoiceText(0, new_detokenizer=ByteDetokenizer, stops=StopMatcher([]), stop_token_ids=frozenset())
    delta = choice.advance(list("a€".encode()[:2]), "length")
    assert (delta.text, delta.finish_reason) == ("a\ufffd", "length")


def test_a_stop_token_counts_and_has_no_text() -> None:
    choice = ChoiceText(0, new_detokenizer=ByteDetokenizer, stops=StopMatcher([]), stop_token_ids=frozenset({98}))
    delta = choice.advance(list(b"ab"), "stop")
    assert (delta.text, choice.num_tokens) == ("a", 2)


def test_the_log_takes_a_position_once() -> None:
    log = RequestLog(num_choices=2, max_tokens=5)
    log.append(choice=0, position=0, ids=[1, 2])
    log.append(choice=0, position=1, ids=[9, 3])  # a resumed engine repeats itself: the first writer wins
    log.append(choice=0, position=0, ids=[1])
    assert list(log.tokens(0)) == [1, 2, 3]
    assert list(log.tokens(0, start=2)) == [3]
    assert log.have() == [3, 0]


@pytest.mark.parametrize(("choice", "position", "ids"), [(0, 1, [1]), (2, 0, [1]), (1, 0, [1] * 6)])
def test_the_log_refuses_gaps_strangers_and_too_much(choice: int, position: int, ids: list[int]) -> None:
    log = RequestLog(num_choices=2, max_tokens=5)
    with pytest.raises(RemoteProtocolError):
        log.append(choice=choice, position=position, ids=ids)


SCORED = SamplingParams(logprobs=True, top_logprobs=1, prompt_logprobs=True)
ONE = TokenLogprobs(-1.0, ((65, -1.0),))


def test_the_log_takes_no_log_probabilities_that_its_request_did_not_ask_for() -> None:
    plain = RequestLog(num_choices=1, max_tokens=5, prompt_tokens=5)
    with pytest.raises(RemoteProtocolError, match="did not ask for"):
        plain.add_prompt_logprobs(position=1, logprobs=[ONE] * 4)
    with pytest.raises(RemoteProtocolError, match="did not ask for"):
        plain.append(choice=0, position=0, ids=[1], logprobs=[ONE])
    scored = RequestLog(num_choices=1, max_tokens=5, prompt_tokens=5, sampling=SCORED)
    scored.add_prompt_logprobs(position=1, logprobs=[ONE] * 4)
    scored.add_prompt_logprobs(position=1, logprobs=[ONE] * 4)  # a resumed engine repeats itself
    for position, count in ((5, 1), (1, 5), (0, 4)):
        with pytest.raises(RemoteProtocolError):
            scored.add_prompt_logprobs(position=position, logprobs=[ONE] * count)
    with pytest.raises(RemoteProtocolError, match="alternatives"):
        scored.append(choice=0, position=0, ids=[1], logprobs=[TokenLogprobs(-1.0, ONE.top * 2)])
    assert len(scored.prompt_logprobs) == 4


@pytest.mark.parametrize(("choice", "num_tokens", "cached"), [(1, 2, 0), (0, 3, 0), (0, 1, 0), (0, 2, 6)])
def test_the_log_refuses_endings_that_it_knows_better(choice: int, num_tokens: int, cached: int) -> None:
    log = RequestLog(num_choices=1, max_tokens=5, prompt_tokens=5)
    log.append(choice=0, position=0, ids=[1, 2])
    log.check_ending(0, num_tokens=2, cached_prompt_tokens=5)
    with pytest.raises(RemoteProtocolError):
        log.check_ending(choice, num_tokens=num_tokens, cached_prompt_tokens=cached)
