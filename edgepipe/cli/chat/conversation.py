"""One question to the model: streams the answer, then prints one line of figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgepipe.cli.chat.answer_view import AnswerView, Thinking, make_view
from edgepipe.cli.output import make_console, print_json
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.cli.find import Target
    from edgepipe.cli.sse import ChatClient, EventContent


_HEARTBEAT = "still working"
_RECOVERING = "recovering"
_READING = "reading"
_SLOW_START_S = 0.5  # wait before the first note
_SLOW_WORD_S = 3.0  # the slowest machines take a second or two for a word


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Values of the flags of ``chat``."""

    data_dir: Path
    model: str
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    as_json: bool = False
    markdown: bool = True  # format Markdown if the output is a terminal
    thinking: Thinking = "fold"

    def options(self) -> dict[str, Any]:
        """Return the fields of requests; None: not given."""
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer and its figures."""

    text: str
    reasoning: str = ""
    finish_reason: str
    num_tokens: int
    num_prompt_tokens: int
    first_word_s: float  # time to the first word, of the reasoning if there is any
    thought_s: float = 0.0  # time from the first word of the reasoning to the first of the answer
    tokens_per_s: float  # rate after the first token; 0: too short to measure
    num_nodes: int
    note: str = ""  # the gateway's last note on this request
    max_tokens: int | None = None  # the request's limit

    @property
    def context_full(self) -> bool:
        """Whether the full context cut the answer: it is cut, below the request's limit."""
        return self.finish_reason == "length" and (self.max_tokens is None or self.num_tokens < self.max_tokens)

    def footer(self) -> str:
        """Format the figures: ``412 tok · 11.4 tok/s · first word 1.2 s · 2 nodes``."""
        parts = [f"{self.num_tokens} tok"]
        if self.tokens_per_s:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        parts.append(f"first word {self.first_word_s:.1f} s")
        if self.note:
            parts.append(one_line(self.note))
        elif self.num_nodes:
            parts.append(f"{self.num_nodes} node{'s' * (self.num_nodes != 1)}")
        if self.finish_reason == "length":
            cut = "cut: the context is full" if self.context_full else "cut by max tokens"
            parts.append(cut if self.text or not self.reasoning else f"{cut}, still thinking")
        return " · ".join(parts)


def with_advice(options: Mapping[str, Any], advice: Mapping[str, float]) -> dict[str, Any]:
    """Add the sampling that the model's makers advise to fields that the user did not set."""
    return {**advice, **{name: value for name, value in options.items() if value is not None}}


class PartialAnswer:
    """An answer in progress; the text so far is an answer, too."""

    def __init__(
        self,
        *,
        num_nodes: int,
        max_tokens: int | None,
        view: AnswerView,
        slow_start_s: float = _SLOW_START_S,
        slow_word_s: float = _SLOW_WORD_S,
    ) -> None:
        """``slow_start_s``, ``slow_word_s``: waits for the first and for a later word, after which a note explains."""
        self._slow_start_s, self._slow_word_s = slow_start_s, slow_word_s
        self._num_nodes, self._max_tokens = num_nodes, max_tokens
        self._view = view
        self._started_s = time.monotonic()
        self._first_s = self._last_s = 0.0
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._thinks_since_s = 0.0  # 0: no reasoning arrives now
        self._thought_s = 0.0
        self._reason, self._note, self._read = "", "", ""
        self._quiet = False  # the view shows a note
        self._num_tokens, self._num_prompt_tokens = 0, 0

    def take(self, piece: EventContent) -> None:
        """Show the piece and count it."""
        if piece.reasoning or piece.text:
            self._last_s = time.monotonic()
            self._first_s = self._first_s or self._last_s
        if piece.reasoning:
            self._thinks_since_s = self._thinks_since_s or self._last_s
            self._thoughts.append(piece.reasoning)
            self._view.think(piece.reasoning)
        if piece.text:
            self.end_reasoning()
            self._texts.append(piece.text)
            self._view.show(piece.text)
        if piece.note:
            self._take_note(piece.note)
        self._reason = piece.finish_reason or self._reason
        self._num_tokens = piece.completion_tokens or self._num_tokens
        if piece.prompt_tokens and piece.prompt_tokens != self._num_prompt_tokens:
            self._num_prompt_tokens = piece.prompt_tokens
            if self._quiet and not self._first_s:
                self.quiet()

    def end_reasoning(self) -> None:
        """Show that the reasoning has ended, if some came."""
        if self._thinks_since_s:
            seconds = time.monotonic() - self._thinks_since_s
            self._thought_s, self._thinks_since_s = self._thought_s + seconds, 0.0
            self._view.thought(seconds)

    def _take_note(self, note: str) -> None:
        """Handle a note of the gateway: ``recovering: studio gone since 21:14``, ``reading 60 %``, or a final note."""
        kind, _, rest = note.partition(" ")
        if kind.rstrip(":") == _RECOVERING:
            self._note = rest
            self._view.wait(f"{one_line(rest) or 'a part of the model is lost'}, continuing ...", news=True)
        elif kind == _READING:
            self._read = f", {rest}"
            self.quiet()
        elif note != _HEARTBEAT:
            self._note = note

    def quiet(self) -> None:
        """Show why no text has arrived for a while."""
        self._quiet = True
        if self._first_s:
            self._view.wait("waiting for the next word")
        elif self._num_prompt_tokens:
            self._view.wait(f"reading {self._num_prompt_tokens:,} tokens{one_line(self._read)}")
        else:
            self._view.wait("waiting for the first word")

    @property
    def quiet_after_s(self) -> float:
        """Return the seconds without text after which the view shows a note."""
        return self._slow_word_s if self._first_s else self._slow_start_s

    def answer(self) -> Answer:
        """Return the answer so far."""
        first_s, last_s, tokens = self._first_s, self._last_s, self._num_tokens
        return Answer(
            text="".join(self._texts),
            reasoning="".join(self._thoughts),
            finish_reason=self._reason,
            num_tokens=tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            first_word_s=(first_s or time.monotonic()) - self._started_s,
            thought_s=self._thought_s,
            tokens_per_s=(tokens - 1) / (last_s - first_s) if tokens > 2 and last_s > first_s else 0.0,
            num_nodes=self._num_nodes,
            note=self._note,
            max_tokens=self._max_tokens,
        )


async def stream_answer(
    client: ChatClient,
    target: Target,
    messages: Sequence[Mapping[str, str]],
    options: Mapping[str, Any],
    incoming: PartialAnswer,
) -> Answer:
    """Ask, show the answer as it arrives, and show notes during pauses. Raises the gateway's error."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(incoming.quiet_after_s, incoming.quiet)
    try:
        async for piece in client.stream(messages, model=target.model, options=options):
            incoming.take(piece)
            if piece.text or piece.reasoning:
                timer.cancel()
                timer = loop.call_later(incoming.quiet_after_s, incoming.quiet)
    finally:
        timer.cancel()
        incoming.end_reasoning()
    return incoming.answer()


async def ask_once(settings: ChatSettings, question: str) -> None:
    """Ask one question. Print the answer on stdout and the figures on stderr, or both as JSON on stdout."""
    from edgepipe.cli.find import find_target
    from edgepipe.cli.sse import ChatClient

    target = await find_target(settings.data_dir, settings.model)
    messages = [{"role": "system", "content": settings.system}] if settings.system else []
    messages.append({"role": "user", "content": question})
    options = with_advice(settings.options(), target.sampling)
    async with ChatClient(target.base_url, api_key=target.api_key) as client:
        if settings.as_json:
            incoming = PartialAnswer(num_nodes=target.num_nodes, max_tokens=settings.max_tokens, view=AnswerView())
            answer = await stream_answer(client, target, messages, options, incoming)
            print_json(as_json(answer, target))
            return
        with make_view(markdown=settings.markdown, thinking=settings.thinking) as view:
            incoming = PartialAnswer(num_nodes=target.num_nodes, max_tokens=settings.max_tokens, view=view)
            answer = await stream_answer(client, target, messages, options, incoming)
    print_footer(answer)


def as_json(answer: Answer, target: Target) -> dict[str, Any]:
    """Convert an answer and its figures to JSON."""
    return {
        "model": target.model,
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "completion_tokens": answer.num_tokens,
        "prompt_tokens": answer.num_prompt_tokens,
        "first_word_s": round(answer.first_word_s, 4),
        "thought_s": round(answer.thought_s, 4),
        "tokens_per_s": round(answer.tokens_per_s, 2),
        "nodes": answer.num_nodes,
    }


def print_footer(answer: Answer) -> None:
    """Print the line of figures below an answer, on stderr."""
    make_console(stderr=True).print(answer.footer(), style="dim")
