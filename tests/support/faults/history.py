"""What clients saw and what was done to the cluster meanwhile, and the rules that hold whatever was done.

Clients record every event, the nemesis every fault; ``check`` finds what breaks a rule and ``Violation.story`` prints
the smallest timeline that shows it. After the history checks of Jepsen and of etcd's robustness tests.

I1  a position is given once          I2  in order, none left out        I3  what was sent never changes
I4  replaced epochs are dropped       I5  a step counts once             I6  draws are a function of the log
I7  text, reasons and usage are functions of the log                     I8  one ending per choice and per answer
I10 every answer ends, and no pause exceeds the bound

I4, I5 and I6 are seen through the tokens: the emulated model's next token depends on every KV slot of the sequence and
on the layers that wrote it, so a stale frame, a step applied twice or another draw gives another token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 8  # token ids on either side of the first wrong one
_LOOK = 64  # a shift between given and expected tokens is looked for this far


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request went out."""

    at_s: float
    stream: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A chunk of a choice came."""

    at_s: float
    stream: str
    choice: int
    ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """A comment line came: the stream lives, and waits."""

    at_s: float
    stream: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The usage chunk came."""

    at_s: float
    stream: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The answer ended: ``done`` | ``error`` (with its code) | ``broken`` | ``left`` (by the client's own wish)."""

    at_s: float
    stream: str
    how: str
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """The nemesis did something."""

    at_s: float
    what: str


Event = Asked | Given | Noted | Counted | Ended | Struck


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that a request gives, per choice: ids, text, finish reason. ``prompt_tokens`` counts the prompt once."""

    ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(map(len, self.ids))


@dataclass(slots=True)
class History:
    """Everything that was recorded, in the order of recording."""

    seed: int = 0
    events: list[Event] = field(default_factory=list[Event])

    def add(self, event: Event) -> None:
        """Record."""
        self.events.append(event)

    def streams(self) -> list[str]:
        """Every stream that was asked for."""
        return [event.stream for event in self.events if isinstance(event, Asked)]

    def of(self, stream: str) -> list[Event]:
        """The events of one stream."""
        return [event for event in self.events if not isinstance(event, Struck) and event.stream == stream]

    def answer(self, stream: str) -> Answer:
        """What a stream has given so far."""
        given = [event for event in self.of(stream) if isinstance(event, Given)]
        num_choices = max((event.choice for event in given), default=-1) + 1
        parts = [[event for event in given if event.choice == choice] for choice in range(num_choices)]
        counted = [event for event in self.of(stream) if isinstance(event, Counted)]
        return Answer(
            ids=tuple(tuple(token for event in part for token in event.ids) for part in parts),
            texts=tuple("".join(event.text for event in part) for part in parts),
            reasons=tuple(next((e.finish_reason for e in part if e.finish_reason), "") for part in parts),
            prompt_tokens=counted[-1].prompt_tokens if counted else 0,
        )

    def stall_s(self, stream: str, *, since_s: float = float("-inf")) -> float | None:
        """The longest time without a token that reaches beyond ``since_s``; None if no token came after that."""
        times = [event.at_s for event in self.of(stream) if isinstance(event, Given) and (event.ids or event.text)]
        gaps = [later - sooner for sooner, later in itertools.pairwise(times) if later > since_s]
        return max(gaps, default=None)

    def pause_s(self, stream: str) -> float:
        """The longest time without anything new: comment lines show that the stream lives, not that it gets on."""
        times = [event.at_s for event in self.of(stream) if not isinstance(event, Noted)]
        return max((later - sooner for sooner, later in itertools.pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One rule broken by one stream."""

    rule: str  # "I1" ... "I10"
    stream: str
    what: str
    at_s: float

    def story(self, history: History) -> str:
        """The seed, what is wrong, and the smallest timeline that shows it."""
        first = next((event.at_s for event in history.of(self.stream)), 0.0)
        lines = [f"seed {history.seed} · {self.rule} broken by {self.stream}: {self.what}"]
        run: list[Given] = []
        for event in history.events:
            if isinstance(event, Struck):
                shown = event.at_s >= first - 5.0
            else:
                shown = event.stream == self.stream
            if not shown:
                continue
            if isinstance(event, Given) and event.finish_reason is None and event.at_s < self.at_s:
                run.append(event)
                continue
            lines += _run_line(run, first)
            run = []
            lines.append(f"  {event.at_s - first:8.3f} s  {_line(event)}")
            if event.at_s > self.at_s and not isinstance(event, Struck):
                break
        lines += _run_line(run, first)
        return "\n".join(lines)


def check(
    history: History,
    *,
    expected: Mapping[str, Answer],
    most_pause_s: float,
    allowed_errors: Iterable[str] = (),
    ended_at_s: float | None = None,
    under_way: Iterable[str] = (),
) -> list[Violation]:
    """Every broken rule, by stream in the order asked. Streams without an expected answer are held to I7, I8 and I10.

    ``allowed_errors``: codes with which an answer may end where the model no longer fits; what was sent must still be
    right. ``ended_at_s``: when the recording ended, for streams that never did. ``under_way``: streams that need not
    have ended yet.
    """
    found: list[Violation] = []
    open_streams = frozenset(under_way)
    for stream in history.streams():
        events = history.of(stream)
        if stream not in open_streams or any(isinstance(event, Ended) for event in events):
            found += _endings(stream, events, frozenset(allowed_errors), ended_at_s)
        found += _derived(stream, events, history.answer(stream))
        if (pause_s := history.pause_s(stream)) > most_pause_s:
            found.append(
                Violation(rule="I10", stream=stream, what=f"nothing new for {pause_s:.1f} s", at_s=_end(events))
            )
        if stream in expected:
            found += _tokens(stream, events, history.answer(stream), expected[stream])
    return found


def assert_holds(history: History, violations: Sequence[Violation]) -> None:
    """Raise AssertionError with the first story and how many more there are."""
    if violations:
        more = f"\n... and {len(violations) - 1} more" if len(violations) > 1 else ""
        raise AssertionError(violations[0].story(history) + more)


def _endings(
    stream: str, events: Sequence[Event], allowed_errors: frozenset[str], ended_at_s: float | None
) -> list[Violation]:
    found: list[Violation] = []
    endings = [event for event in events if isinstance(event, Ended)]
    at_s = ended_at_s if ended_at_s is not None else _end(events)
    if not endings:
        found.append(Violation(rule="I10", stream=stream, what="it never ended", at_s=at_s))
    if len(endings) > 1:
        found.append(Violation(rule="I8", stream=stream, what=f"{len(endings)} endings", at_s=endings[1].at_s))
    for ending in endings[:1]:
        late = [event for event in events[events.index(ending) + 1 :] if not isinstance(event, Ended)]
        if late:
            found.append(Violation(rule="I8", stream=stream, what="it went on after its end", at_s=late[0].at_s))
        if ending.how == "broken" or (ending.how == "error" and ending.what not in allowed_errors):
            what = f"it ended with {ending.how} {ending.what}".strip()
            found.append(Violation(rule="I8", stream=stream, what=what, at_s=ending.at_s))
    return found


def _derived(stream: str, events: Sequence[Event], answer: Answer) -> list[Violation]:
    """One finish reason per choice and nothing behind it; usage as the tokens say."""
    found: list[Violation] = []
    finished: set[int] = set()
    done = any(isinstance(event, Ended) and event.how == "done" for event in events)
    for event in events:
        if isinstance(event, Given):
            if event.choice in finished:
                what = f"choice {event.choice} went on behind its finish reason"
                found.append(Violation(rule="I8", stream=stream, what=what, at_s=event.at_s))
            if event.finish_reason is not None:
                finished.add(event.choice)
        elif isinstance(event, Counted) and event.completion_tokens != answer.completion_tokens:
            what = f"usage says {event.completion_tokens} tokens, {answer.completion_tokens} came"
            found.append(Violation(rule="I7", stream=stream, what=what, at_s=event.at_s))
    missing = set(range(len(answer.ids))) - finished
    if done and missing:
        what = f"choice {min(missing)} has no finish reason"
        found.append(Violation(rule="I8", stream=stream, what=what, at_s=_end(events)))
    return found


def _tokens(stream: str, events: Sequence[Event], answer: Answer, expected: Answer) -> list[Violation]:
    """What was given against what must be: all of it, or as far as the stream came."""
    found: list[Violation] = []
    done = any(isinstance(event, Ended) and event.how == "done" for event in events)
    for choice, ids in enumerate(answer.ids):
        wanted = expected.ids[choice] if choice < len(expected.ids) else ()
        if (place := _first_difference(ids, wanted)) is not None:
            rule, what = _difference(ids, wanted, place)
            what = f"choice {choice}, position {place}: {what}"
            found.append(Violation(rule=rule, stream=stream, what=what, at_s=_time_of(events, choice, place)))
        elif done and len(ids) < len(wanted):
            what = f"choice {choice} ended after {len(ids)} of {len(wanted)} tokens"
            found.append(Violation(rule="I2", stream=stream, what=what, at_s=_end(events)))
        text, right = answer.texts[choice], expected.texts[choice] if choice < len(expected.texts) else ""
        if not found and (text != right if done else not right.startswith(text)):
            what = f"choice {choice}: its text is not that of its tokens: {text[-40:]!r} against {right[-40:]!r}"
            found.append(Violation(rule="I7", stream=stream, what=what, at_s=_end(events)))
    if done and not found:
        if answer.reasons != expected.reasons:
            what = f"finish reasons {answer.reasons}, not {expected.reasons}"
            found.append(Violation(rule="I7", stream=stream, what=what, at_s=_end(events)))
        if answer.prompt_tokens and answer.prompt_tokens != expected.prompt_tokens:
            what = f"usage counts {answer.prompt_tokens} prompt tokens, not {expected.prompt_tokens}"
            found.append(Violation(rule="I7", stream=stream, what=what, at_s=_end(events)))
    return found


def _first_difference(ids: Sequence[int], wanted: Sequence[int]) -> int | None:
    for place, (token, expected) in enumerate(zip(ids, wanted, strict=False)):
        if token != expected:
            return place
    return len(wanted) if len(ids) > len(wanted) else None


def _difference(ids: Sequence[int], wanted: Sequence[int], place: int) -> tuple[str, str]:
    """Which rule a difference breaks: doubled (I1), left out or out of order (I2), changed (I3)."""
    rest = tuple(ids[place : place + _SHOWN])
    shown = f"{list(rest)} came, {list(wanted[place : place + _SHOWN])} was due"
    for shift in range(1, min(_LOOK, place) + 1):
        if len(rest) > 1 and rest == tuple(wanted[place - shift : place - shift + len(rest)]):
            return "I1", f"{shift} tokens doubled: {shown}"
    for shift in range(1, _LOOK + 1):
        if len(rest) > 1 and rest == tuple(wanted[place + shift : place + shift + len(rest)]):
            return "I2", f"{shift} tokens left out: {shown}"
    return "I3", f"another token: {shown}"


def _time_of(events: Sequence[Event], choice: int, place: int) -> float:
    count = 0
    for event in events:
        if isinstance(event, Given) and event.choice == choice:
            count += len(event.ids)
            if count > place:
                return event.at_s
    return _end(events)


def _end(events: Sequence[Event]) -> float:
    return events[-1].at_s if events else 0.0


def _run_line(run: Sequence[Given], first: float) -> list[str]:
    """Many chunks as one line."""
    if not run:
        return []
    count = sum(len(event.ids) for event in run)
    when = f"  {run[0].at_s - first:8.3f} s  "
    until = f" until {run[-1].at_s - first:.3f} s" if len(run) > 1 else ""
    return [f"{when}{count} tokens of choice {', '.join(map(str, sorted({event.choice for event in run})))}{until}"]


def _line(event: Event) -> str:
    if isinstance(event, Asked):
        body = {key: value for key, value in event.body.items() if key not in ("prompt", "messages")}
        return f"asked {body}"
    if isinstance(event, Given):
        reason = f", ended: {event.finish_reason}" if event.finish_reason else ""
        return f"choice {event.choice}: {list(event.ids)} {event.text!r}{reason}"
    if isinstance(event, Noted):
        return f"comment: {event.text}"
    if isinstance(event, Counted):
        return f"usage: {event.prompt_tokens} + {event.completion_tokens}"
    if isinstance(event, Ended):
        return f"end: {event.how} {event.what}"
    return f"FAULT {event.what}"
