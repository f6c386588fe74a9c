"""One exchange with the model: the answer as it comes, then one line of figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgepipe.cli.output import make_console, print_json
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.cli.find import Target
    from edgepipe.cli.sse import ChatClient


_HEARTBEAT = "still working"
_RECOVERING = "recovering: "


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What the flags of ``chat`` say."""

    data_dir: Path
    model: str
    system: str = ""
    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    as_json: bool = False
    markdown: bool = True  # drawn where somebody looks at a terminal

    def options(self) -> dict[str, Any]:
        """Fields of the request; None means not given."""
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer and how it came."""

    text: str
    finish_reason: str
    num_tokens: int
    num_prompt_tokens: int
    first_word_s: float
    tokens_per_s: float  # after the first one; 0: too short to tell
    num_nodes: int
    note: str = ""  # the last thing that the gateway told beside it

    def footer(self) -> str:
        """``412 tok · 11.4 tok/s · first word 1.2 s · 2 nodes``"""
        parts = [f"{self.num_tokens} tok"]
        if self.tokens_per_s:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        parts.append(f"first word {self.first_word_s:.1f} s")
        if self.note:
            parts.append(one_line(self.note))
        elif self.num_nodes:
            parts.append(f"{self.num_nodes} node{'s' * (self.num_nodes != 1)}")
        return " · ".join(parts) + (" · cut by max tokens" if self.finish_reason == "length" else "")


async def stream_answer(
    client: ChatClient,
    target: Target,
    messages: Sequence[Mapping[str, str]],
    options: Mapping[str, Any],
    show: Callable[[str], None],
) -> Answer:
    """Ask and pass the text on as it comes. Raises the gateway's error."""
    started = time.monotonic()
    first = last = 0.0
    texts: list[str] = []
    reason, num_tokens, num_prompt, note = "", 0, 0, ""
    async for piece in client.stream(messages, model=target.model, options=options):
        if piece.text:
            last = time.monotonic()
            first = first or last
            texts.append(piece.text)
            show(piece.text)
        if piece.note and piece.note != _HEARTBEAT:
            note = piece.note.removeprefix(_RECOVERING)
        reason = piece.finish_reason or reason
        num_tokens = piece.completion_tokens or num_tokens
        num_prompt = piece.prompt_tokens or num_prompt
    return Answer(
        text="".join(texts),
        finish_reason=reason,
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt,
        first_word_s=(first or time.monotonic()) - started,
        tokens_per_s=(num_tokens - 1) / (last - first) if num_tokens > 2 and last > first else 0.0,
        num_nodes=target.num_nodes,
        note=note,
    )


async def ask_once(settings: ChatSettings, question: str) -> None:
    """One question, one answer on stdout, the figures on stderr (or all of it as JSON on stdout)."""
    from edgepipe.cli.answer_view import make_view
    from edgepipe.cli.find import find_target
    from edgepipe.cli.sse import ChatClient

    target = await find_target(settings.data_dir, settings.model)
    messages = [{"role": "system", "content": settings.system}] if settings.system else []
    messages.append({"role": "user", "content": question})
    async with ChatClient(target.base_url, api_key=target.api_key) as client:
        if settings.as_json:
            answer = await stream_answer(client, target, messages, settings.options(), _nothing)
            print_json(as_json(answer, target))
            return
        with make_view(markdown=settings.markdown) as view:
            answer = await stream_answer(client, target, messages, settings.options(), view.show)
    print_footer(answer)


def as_json(answer: Answer, target: Target) -> dict[str, Any]:
    """An answer and its figures for scripts."""
    return {
        "model": target.model,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "completion_tokens": answer.num_tokens,
        "prompt_tokens": answer.num_prompt_tokens,
        "first_word_s": round(answer.first_word_s, 4),
        "tokens_per_s": round(answer.tokens_per_s, 2),
        "nodes": answer.num_nodes,
    }


def print_footer(answer: Answer) -> None:
    """The one dim line below an answer, on stderr."""
    make_console(stderr=True).print(answer.footer(), style="dim")


def _nothing(text: str) -> None:
    """Show no piece."""
