"""Conversation in the terminal: ^C stops an answer, ^D ends, /help lists the rest."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgepipe.cli.admin import connect
from edgepipe.cli.chat.answer_view import AnswerView, Thinking, make_view
from edgepipe.cli.chat.conversation import ChatSettings, PartialAnswer, print_footer, stream_answer
from edgepipe.cli.chat.dialogue import Dialogue
from edgepipe.cli.chat.slash import Talk, complete, run_command
from edgepipe.cli.find import find_target
from edgepipe.cli.output import make_console, print_error
from edgepipe.cli.sse import ChatClient
from edgepipe.errors import EdgepipeError, PromptTooLong
from edgepipe.safe_text import as_utf8, one_line

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer

_BLOCK = '"""'


NewView = Callable[[Thinking], AnswerView]


async def converse(settings: ChatSettings, *, new_view: NewView | None = None) -> None:
    """Read, answer, repeat until ^D or /bye. Raises errors of the start; shows later errors and continues.

    ``new_view`` makes the view of each answer; by default as ``settings`` say.
    """
    new_view = new_view or (lambda thinking: make_view(markdown=settings.markdown, thinking=thinking))
    target = await find_target(settings.data_dir, settings.model)
    talk = Talk(data_dir=settings.data_dir, target=target, dialogue=Dialogue.begin(settings))
    talk.model_names = await _model_names(talk)
    session = _session(talk)
    console = make_console(stderr=True)
    nodes = f" on {target.num_nodes} node{'s' * (target.num_nodes != 1)}" if target.num_nodes else ""
    console.print(f"{one_line(target.model)}{nodes} · /help for help, ^D to end", style="dim")
    while not talk.over and (line := await _read(session)) is not None:
        try:
            if line.startswith("/"):
                command = asyncio.ensure_future(run_command(talk, line))
                with _interrupts(command):
                    await command
            elif line:
                talk.dialogue.ask(line)
                talk.again = True
            if talk.again:
                talk.again = False
                await _answer(talk, new_view)
        except EdgepipeError as error:
            print_error(error)


async def _answer(talk: Talk, new_view: NewView) -> None:
    """Answer the last question; with ``history drop``, drop the oldest turns if needed. Raises PromptTooLong."""
    dialogue, dropped = talk.dialogue, int(talk.dialogue.full and talk.dialogue.drop_oldest())
    try:
        while True:
            try:
                return await _stream(talk, new_view)
            except PromptTooLong as error:
                if not dialogue.drop_oldest():
                    raise _full_context(error) if dialogue.has_earlier_turns else error from None
                dropped += 1
    finally:
        if dropped:
            omitted = (
                "the oldest question and its answer" if dropped == 1 else f"the {dropped} oldest questions and answers"
            )
            make_console(stderr=True).print(f"the context is full: left out {omitted}", style="dim")
        dialogue.forget_unanswered()


def _full_context(error: PromptTooLong) -> PromptTooLong:
    return PromptTooLong(
        "the conversation no longer fits into the model's context",
        fact=error.fact,
        next_step="/clear    (or drop the oldest questions: /set history drop)",
    )


async def _stream(talk: Talk, new_view: NewView) -> None:
    """Stream one answer and add it to the conversation."""
    dialogue = talk.dialogue
    options = dialogue.request_options(talk.target.sampling)
    view = new_view(dialogue.thinking)
    incoming = PartialAnswer(num_nodes=talk.target.num_nodes, max_tokens=options.get("max_tokens"), view=view)
    async with ChatClient(talk.target.base_url, api_key=talk.target.api_key) as client:
        messages = dialogue.messages()
        work = asyncio.ensure_future(stream_answer(client, talk.target, messages, options, incoming))
        try:
            with _interrupts(work):
                with view:
                    answer = await work
                print_footer(answer)  # below the whole answer
        finally:
            dialogue.answered(incoming.answer())


@contextmanager
def _interrupts(work: asyncio.Future[Any]) -> Generator[None]:
    """Make ^C cancel ``work``, not the program, inside the block. Then leave the block and say so."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, work.cancel)
    try:
        yield
    except asyncio.CancelledError:
        if not work.cancelled():
            raise
        make_console(stderr=True).print("stopped", style="dim")
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _model_names(talk: Talk) -> tuple[str, ...]:
    """List the models that this machine's node knows: served or on any node's disk."""
    try:
        async with connect(talk.data_dir) as admin:
            status = await admin.status()
    except EdgepipeError:
        return (talk.target.model,)
    on_disk = {entry.model for member in status.members for entry in member.node.models if entry.complete}
    return tuple(sorted(on_disk | {engine.model for engine in status.engines} | {talk.target.model}))


def _session(talk: Talk) -> PromptSession[str]:
    """Make the input line, with a history file that only its owner can read."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
        event.current_buffer.insert_text("\n")

    path = talk.data_dir / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        history: History = FileHistory(str(path))
    except OSError:
        history = InMemoryHistory()
    return PromptSession(
        message=">>> ",
        history=history,
        key_bindings=keys,
        prompt_continuation=lambda width, line, wraps: "    " if wraps else "... ",
        completer=_completer(talk),
        complete_while_typing=False,
        enable_open_in_editor=True,
    )


def _completer(talk: Talk) -> Completer:
    """Tab completes slash commands and their first word."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    class SlashCompleter(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            text = document.text_before_cursor
            if text.startswith("/"):
                last = text.rpartition(" ")[2]
                yield from (Completion(word, start_position=-len(last)) for word in complete(talk, text))

    return SlashCompleter()


async def _read(session: PromptSession[str]) -> str | None:
    '''Read one question; None at the end. ^C clears the input; """ begins and ends a block of lines.'''
    lines: list[str] = []
    while True:
        try:
            text = await session.prompt_async("... " if lines else ">>> ")
        except KeyboardInterrupt:
            lines.clear()
            continue
        except EOFError:
            return None
        lines.append(as_utf8(text))
        block = "\n".join(lines).strip()
        if not block.startswith(_BLOCK):
            return block
        if len(block) >= 2 * len(_BLOCK) and block.endswith(_BLOCK):
            return block.removeprefix(_BLOCK).removesuffix(_BLOCK).strip()
