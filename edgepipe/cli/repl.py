"""A conversation in the terminal: ^C stops an answer, ^D ends, /help says the rest."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgepipe.cli.conversation import ChatSettings, print_footer, show_text, stream_answer
from edgepipe.cli.find import Target, find_target
from edgepipe.cli.output import make_console, print_error, printable
from edgepipe.cli.sse import ChatClient
from edgepipe.errors import EdgepipeError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

_HELP = """\
  Enter        send                     /clear   forget the conversation
  Alt-Enter    new line                 /bye     end (also ^D)
  ^C           stop the answer          /help    this"""


async def converse(settings: ChatSettings) -> None:
    """Read, answer, repeat until ^D or /bye. Raises what hinders the start; later errors are shown and it goes on."""
    target = await find_target(settings.data_dir, settings.model)
    session = _session(settings)
    console = make_console(stderr=True)
    nodes = f" on {target.num_nodes} node{'s' * (target.num_nodes != 1)}" if target.num_nodes else ""
    console.print(f"{printable(target.model)}{nodes} · /help for help, ^D to end", style="dim")
    messages = settings.first_messages()
    async with ChatClient(target.base_url) as client:
        while (question := await _read(session)) is not None:
            if question == "/help":
                console.print(_HELP, style="dim")
            elif question == "/clear":
                messages = settings.first_messages()
                console.print("forgotten", style="dim")
            elif question.startswith("/"):
                console.print(f"there is no {printable(question.split()[0])}; see /help", style="dim")
            elif question:
                messages.append({"role": "user", "content": question})
                await _answer(client, target, messages, settings)


async def _answer(client: ChatClient, target: Target, messages: list[dict[str, str]], settings: ChatSettings) -> None:
    """Stream one answer and keep what came of it; an unanswered question is forgotten."""
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        show_text(text)

    work = asyncio.ensure_future(stream_answer(client, target, messages, settings.options(), show))
    try:
        with _interrupts(work):
            answer = await work
        print(flush=True)
        print_footer(answer)
    except asyncio.CancelledError:
        if not work.cancelled():
            raise
        print(flush=True)
        make_console(stderr=True).print("stopped", style="dim")
    except EdgepipeError as error:
        print(flush=True)
        print_error(error)
    if shown:
        messages.append({"role": "assistant", "content": "".join(shown)})
    else:
        messages.pop()


@contextmanager
def _interrupts(work: asyncio.Future[Any]) -> Generator[None]:
    """While the block runs, ^C cancels ``work`` and not the program."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, work.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _session(settings: ChatSettings) -> PromptSession[str]:
    """The input line, with a history that survives (readable by its owner only)."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
        event.current_buffer.insert_text("\n")

    path = settings.data_dir / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        history: History = FileHistory(str(path))
    except OSError:
        history = InMemoryHistory()
    return PromptSession(message=">>> ", history=history, key_bindings=keys, prompt_continuation="... ")


async def _read(session: PromptSession[str]) -> str | None:
    """One question; None at the end. ^C at an empty prompt clears it."""
    while True:
        try:
            text = (await session.prompt_async()).strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return None
        return None if text in ("/bye", "/exit", "/quit") else text
