"""State of a conversation: its messages and the settings of the next request. Knows no terminal."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgepipe.cli.chat.answer_view import THINKING, Thinking
from edgepipe.cli.chat.conversation import Answer, ChatSettings, with_advice
from edgepipe.errors import RequestInvalid
from edgepipe.plain_words import plain
from edgepipe.units import format_bytes

Message = dict[str, str]

_MAX_FILE_BYTES = 64 << 20  # longer than any context
_OTHER_FILE = "/load NAME    (Tab shows the saved ones)"
_FORMAT = "edgepipe-chat-1"

_OTHER_TEMPERATURE = 0.7  # temperature of another answer after a greedy one: greedy sampling would repeat it


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a request that ``/set`` takes."""

    kind: Callable[[str], Any]
    lowest: float = -math.inf
    highest: float = math.inf

    def read(self, name: str, text: str) -> Any:
        """Parse a value. Raises RequestInvalid."""
        try:
            value = self.kind(text)
        except ValueError:
            wanted = "a whole number" if self.kind is int else "a number"
            raise RequestInvalid(
                f"{name} must be {wanted}", fact=f"given: {text}", next_step=f"/set {name} default"
            ) from None
        if self.kind is not str and not self.lowest <= value <= self.highest:
            bounds = f"{self.lowest:g} to {self.highest:g}" if self.highest < math.inf else f"{self.lowest:g} or more"
            raise RequestInvalid(
                f"{name} cannot be {text}", fact=f"it can be {bounds}", next_step=f"/set {name} default"
            )
        return value


HISTORY = ("stop", "drop")
"""When the context is full: stop until ``/clear``, or drop the oldest questions and answers."""

OPTIONS: Mapping[str, Option] = {
    "temperature": Option(float, 0, 2),
    "top_p": Option(float, 0.001, 1),
    "top_k": Option(int, 0),
    "min_p": Option(float, 0, 1),
    "max_tokens": Option(int, 1),
    "seed": Option(int),
    "repetition_penalty": Option(float, 0.01, 100),
    "presence_penalty": Option(float, -2, 2),
    "frequency_penalty": Option(float, -2, 2),
    "stop": Option(str),
    "reasoning_effort": Option(str),
}


@dataclass(slots=True, kw_only=True)
class Dialogue:
    """Messages and settings of one conversation."""

    system: str
    options: dict[str, Any]
    turns: list[Message] = field(default_factory=list[Message])
    answers: list[Answer] = field(default_factory=list[Answer])  # answers of this session, which ``/stats`` shows
    taken_back: Message | None = None  # the old answer, restored if no new answer arrives
    history: str = HISTORY[0]  # policy for the oldest turns when the context is full
    first: int = 0  # index of the first turn to send
    full: bool = False  # the last answer ended with the context
    thinking: Thinking = "fold"

    @classmethod
    def begin(cls, settings: ChatSettings) -> Dialogue:
        """Make a conversation from the flags."""
        return cls(system=settings.system, options=settings.options(), thinking=settings.thinking)

    def messages(self) -> list[Message]:
        """Return the messages of the next request."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns[self.first :]]

    @property
    def has_earlier_turns(self) -> bool:
        """Whether requests include turns before the last question."""
        return len(self.turns) - self.first > 1

    def drop_oldest(self) -> bool:
        """Leave the oldest question and answer out of requests; saved files keep them. False: none may be dropped."""
        later = (index for index in range(self.first + 1, len(self.turns)) if self.turns[index]["role"] == "user")
        start = next(later, None) if self.history == "drop" else None
        self.first = self.first if start is None else start
        return start is not None

    def clear(self) -> None:
        """Start a new conversation."""
        self.turns.clear()
        self.first, self.full = 0, False

    def request_options(self, advice: Mapping[str, float]) -> dict[str, Any]:
        """Return the fields of the next request: set by the user, else advised.

        Another answer to a question never uses greedy sampling or the old seed.
        """
        options = with_advice(self.options, advice)
        if self.taken_back is None:
            return options
        greedy = options.get("temperature") == 0
        return options | {"seed": None} | ({"temperature": _OTHER_TEMPERATURE} if greedy else {})

    def ask(self, question: str) -> None:
        """Add the next question."""
        self.turns.append({"role": "user", "content": question})

    def answered(self, answer: Answer) -> None:
        """Add the answer to the last question, if it has text. Chat templates decide which reasoning they repeat."""
        if answer.text:
            reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            self.turns.append({"role": "assistant", "content": answer.text, **reasoning})
            self.answers.append(answer)
            self.full = answer.context_full
            self.taken_back = None

    def forget_unanswered(self) -> None:
        """Remove a last question without an answer, or restore the answer that was taken back."""
        if self.taken_back:
            self.turns.append(self.taken_back)
            self.taken_back = None
        elif self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def take_back(self) -> None:
        """Remove the last answer, to ask for another one. Raises RequestInvalid without an answer."""
        if len(self.turns) < 2:
            raise RequestInvalid("there is no answer to regenerate", next_step="ask a question first")
        self.taken_back = self.turns.pop()

    def set(self, name: str, text: str) -> None:
        """Set a field of later requests; empty or ``default`` restores the model's own. Raises RequestInvalid."""
        if name == "history":
            wanted = HISTORY[0] if text in ("", "default") else text
            if wanted not in HISTORY:
                fact = f"it can be {' or '.join(HISTORY)}"
                raise RequestInvalid(f"history cannot be {text}", fact=fact, next_step="/set history drop")
            self.history = wanted
            return
        option = OPTIONS.get(name)
        if option is None:
            known = (*OPTIONS, "history")
            close = difflib.get_close_matches(name, known, n=1)
            step = f"/set {close[0] if close else 'temperature'} {text}".rstrip()
            raise RequestInvalid(f"unknown setting '{name}'", fact=f"settings: {', '.join(known)}", next_step=step)
        if text in ("", "default"):
            self.options[name] = None
            return
        self.options[name] = option.read(name, text)

    def last_reasoning(self) -> str:
        """Return the reasoning of the last answer; empty: the model did not think."""
        return self.turns[-1].get("reasoning_content", "") if self.turns else ""

    def set_thinking(self, text: str) -> None:
        """Choose how reasoning is shown. Raises RequestInvalid."""
        ways: dict[str, Thinking] = {way: way for way in THINKING}
        if text not in ways:
            fact = f"it can be {', '.join(THINKING)}"
            raise RequestInvalid(f"reasoning cannot be shown as {text}", fact=fact, next_step="/think show")
        self.thinking = ways[text]

    def save(self, path: Path, *, model: str) -> None:
        """Save the conversation as JSON, or as Markdown if the file name ends in .md. Raises RequestInvalid."""
        text = self._as_markdown(model) if path.suffix == ".md" else self._as_json(model)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
        except OSError as exc:
            raise RequestInvalid(
                f"cannot write {path}", fact=plain(exc), next_step="/save NAME    (in edgepipe's own folder)"
            ) from exc

    def load(self, path: Path) -> str:
        """Load a saved conversation. Return the name of its model. Raises RequestInvalid."""
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                fact = f"a saved conversation has {format_bytes(_MAX_FILE_BYTES)} at most"
                raise RequestInvalid(f"{path} is too long for a conversation", fact=fact, next_step=_OTHER_FILE)
            saved: Any = json.loads(path.read_text(encoding="utf-8"))
            turns = [_turn(message) for message in saved["messages"]]
            if saved["format"] != _FORMAT or any(message["role"] not in ("user", "assistant") for message in turns):
                raise ValueError(path)
            options = {name: saved["options"][name] for name in OPTIONS if name in saved["options"]}
            system, model = str(saved["system"]), str(saved["model"])
        except OSError as exc:
            raise RequestInvalid(f"cannot read {path}", fact=plain(exc), next_step=_OTHER_FILE) from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise RequestInvalid(f"{path} is no conversation saved by /save", next_step=_OTHER_FILE) from exc
        self.clear()
        self.turns, self.system, self.options = turns, system, self.options | options
        return model

    def stats(self) -> str:
        """Describe the last answer and the whole session."""
        if not self.answers:
            return "no answer yet"
        tokens = sum(answer.num_tokens for answer in self.answers)
        rates = [answer.tokens_per_s for answer in self.answers if answer.tokens_per_s]
        first = sorted(answer.first_word_s for answer in self.answers)
        last = self.answers[-1]
        lines = [f"last     {last.footer()}", f"         {last.num_prompt_tokens} prompt tokens"]
        count = len(self.answers)
        session = f"session  {count} answer{'s' * (count != 1)} · {tokens} tok"
        if rates:
            session += f" · {sum(rates) / len(rates):.1f} tok/s (mean)"
        return "\n".join([*lines, f"{session} · first word {first[len(first) // 2]:.1f} s (median)"])

    def _as_json(self, model: str) -> str:
        given = {name: value for name, value in self.options.items() if value is not None}
        saved = {"format": _FORMAT, "model": model, "system": self.system, "options": given, "messages": self.turns}
        return json.dumps(saved, ensure_ascii=False, indent=2) + "\n"

    def _as_markdown(self, model: str) -> str:
        names = {"user": "You", "assistant": model}
        parts = [f"**System**\n\n{self.system}"] if self.system else []
        parts += [f"**{names[turn['role']]}**\n\n{turn['content']}" for turn in self.turns]
        return "\n\n".join(parts) + "\n"


def _turn(saved: Mapping[str, Any]) -> Message:
    """Take a turn from a saved conversation. Raises KeyError."""
    reasoning = {"reasoning_content": str(saved["reasoning_content"])} if "reasoning_content" in saved else {}
    return {"role": str(saved["role"]), "content": str(saved["content"]), **reasoning}
