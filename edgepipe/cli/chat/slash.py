"""Slash commands of a conversation: names, arguments, help and actions."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe.cli.admin import connect
from edgepipe.cli.chat.answer_view import THINKING
from edgepipe.cli.chat.dialogue import OPTIONS, Dialogue
from edgepipe.cli.find import Target, find_target
from edgepipe.cli.output import make_console, wrapped
from edgepipe.cli.views.status_view import drafts_in_words, render_nodes, render_plan
from edgepipe.errors import EdgepipeError, RequestInvalid
from edgepipe.safe_text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from edgepipe.wire.engines import EngineState
    from edgepipe.wire.nodes import ClusterStatus


@dataclass(slots=True, kw_only=True)
class Talk:
    """State that a command may read and change."""

    data_dir: Path
    target: Target
    dialogue: Dialogue
    model_names: tuple[str, ...] = ()  # known names that Tab completes
    again: bool = False  # regenerate the answer to the last question
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlashCommand:
    """One slash command."""

    name: str
    argument: str  # argument as /help shows it
    help: str
    run: Callable[[Talk, str], Awaitable[None]]
    values: Callable[[Talk], Sequence[str]] | None = None  # completions of its first word


async def run_command(talk: Talk, line: str) -> None:
    """Run the command of a line that begins with ``/``. Raises EdgepipeError, also for an unknown command."""
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise RequestInvalid(f"there is no {name}", next_step="/help")
    await command.run(talk, argument.strip())


def complete(talk: Talk, text: str) -> Iterable[str]:
    """Return the possible completions of the last word of ``text``."""
    name, space, argument = text.partition(" ")
    if not space:
        return [command for command in COMMANDS if command.startswith(name)]
    command = COMMANDS.get(name)
    if command is None or command.values is None or " " in argument:
        return []
    return [value for value in command.values(talk) if value.startswith(argument)]


def _console() -> Console:
    return make_console(stderr=True)


def _say(text: str) -> None:
    _console().print(visible(text, keep="\n"), style="dim")


async def _help(talk: Talk, argument: str) -> None:
    keys = (
        ("Enter", "send"),
        ("Alt-Enter", 'new line; or begin and end with """'),
        ("^C", "stop the answer"),
        ("^D", "end"),
    )
    rows = [*keys, *((f"{command.name} {command.argument}".strip(), command.help) for command in COMMANDS.values())]
    left_width, width = max(len(left) for left, _ in rows), _console().width
    for left, right in rows:
        if width < 2 * left_width:  # too narrow for two columns
            _say(f"  {left}\n{wrapped(right, first='      ', width=width)}")
        else:
            _say(wrapped(right, first=f"  {left.ljust(left_width)}  ", width=width))


async def _model(talk: Talk, argument: str) -> None:
    if argument:
        talk.target = await find_target(talk.data_dir, argument)
    nodes = talk.target.num_nodes
    _say(talk.target.model + (f" on {nodes} node{'s' * (nodes != 1)}" if nodes else ""))


async def _system(talk: Talk, argument: str) -> None:
    if argument:
        talk.dialogue.system = "" if argument == '""' else argument
    _say(talk.dialogue.system or "no instructions")


async def _set(talk: Talk, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if name:
        talk.dialogue.set(name, value.strip())
    given = {key: value for key, value in talk.dialogue.options.items() if value is not None}
    advised = {key: value for key, value in talk.target.sampling.items() if key not in given}
    lines = [f"{key} {value}" for key, value in given.items()] + [f"history {talk.dialogue.history}"]
    _say("\n".join([*lines, *(f"{key} {value} (default)" for key, value in advised.items())]))


async def _think(talk: Talk, argument: str) -> None:
    if argument:
        talk.dialogue.set_thinking(argument)
        _say(talk.dialogue.thinking)
    else:
        _say(talk.dialogue.last_reasoning() or "no reasoning in the last answer")


async def _clear(talk: Talk, argument: str) -> None:
    talk.dialogue.clear()
    _say("forgotten")


async def _regenerate(talk: Talk, argument: str) -> None:
    talk.dialogue.take_back()
    talk.again = True


async def _stats(talk: Talk, argument: str) -> None:
    lines = [talk.dialogue.stats()]
    with contextlib.suppress(EdgepipeError):  # the rest is known without this machine's node
        for engine in _engines(talk, await _status(talk)):
            if engine.drafts is not None and (drafts := drafts_in_words(engine.drafts)):
                lines.append(f"replica {engine.replica}: {drafts}" if engine.replica else drafts)
    _say("\n".join(lines))


async def _nodes(talk: Talk, argument: str) -> None:
    _console().print(render_nodes(await _status(talk)))


async def _plan(talk: Talk, argument: str) -> None:
    engines = _engines(talk, await _status(talk))
    if not engines:
        raise RequestInvalid(f"this machine's node does not see {talk.target.model}", next_step="edgepipe status")
    for engine in engines:
        if engine.replica:
            _say(engine.title)
        for part in render_plan(engine):
            _console().print(part)


async def _save(talk: Talk, argument: str) -> None:
    path = _file(talk, argument)
    talk.dialogue.save(path, model=talk.target.model)
    _say(f"saved in {path}")


async def _load(talk: Talk, argument: str) -> None:
    path = _file(talk, argument)
    model = talk.dialogue.load(path)
    questions = sum(turn["role"] == "user" for turn in talk.dialogue.turns)
    other = f" (it was held with {model})" if model != talk.target.model else ""
    _say(f"{questions} question{'s' * (questions != 1)} loaded{other}")


async def _bye(talk: Talk, argument: str) -> None:
    talk.over = True


async def _status(talk: Talk) -> ClusterStatus:
    async with connect(talk.data_dir) as admin:
        return await admin.status()


def _engines(talk: Talk, status: ClusterStatus) -> list[EngineState]:
    """Return the engines of the chat's model, one for each replica."""
    return [engine for engine in status.engines if engine.model == talk.target.model]


def _chats(talk: Talk) -> Path:
    return talk.data_dir / "chats"


def _file(talk: Talk, name: str) -> Path:
    """Return a conversation's file: a plain name is in the data directory, a name with a folder or suffix is a path."""
    name = name or "last"
    path = Path(name).expanduser()
    return path if path.suffix or len(path.parts) > 1 else _chats(talk) / f"{name}.json"


def _saved_names(talk: Talk) -> Sequence[str]:
    try:
        return sorted(path.stem for path in _chats(talk).glob("*.json"))
    except OSError:
        return ()


COMMANDS: Mapping[str, SlashCommand] = {
    command.name: command
    for command in (
        SlashCommand(name="/help", argument="", help="show this list", run=_help),
        SlashCommand(
            name="/model",
            argument="[NAME]",
            help="show the model, or choose another",
            run=_model,
            values=lambda talk: talk.model_names,
        ),
        SlashCommand(name="/system", argument="[TEXT]", help='show or set the instructions; "" for none', run=_system),
        SlashCommand(
            name="/set",
            argument="[NAME [VALUE]]",
            help="show or set temperature, max_tokens, seed, history, ...",
            run=_set,
            values=lambda talk: (*OPTIONS, "history"),
        ),
        SlashCommand(
            name="/think",
            argument="[fold|show|hide]",
            help="show the last answer's reasoning, or set how reasoning appears",
            run=_think,
            values=lambda talk: THINKING,
        ),
        SlashCommand(name="/clear", argument="", help="forget the conversation", run=_clear),
        SlashCommand(name="/regenerate", argument="", help="another answer to the last question", run=_regenerate),
        SlashCommand(name="/stats", argument="", help="show tokens and speed so far", run=_stats),
        SlashCommand(name="/nodes", argument="", help="show the machines", run=_nodes),
        SlashCommand(name="/plan", argument="", help="show where layers run, and the speed", run=_plan),
        SlashCommand(name="/save", argument="[FILE]", help="save the conversation; FILE.md as text", run=_save),
        SlashCommand(name="/load", argument="[FILE]", help="load a saved conversation", run=_load, values=_saved_names),
        SlashCommand(name="/bye", argument="", help="end", run=_bye),
    )
}
