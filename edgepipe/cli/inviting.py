"""``edgepipe node invite``: shows a pairing code and the machines that use it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from edgepipe.addresses import host_and_port
from edgepipe.cli.admin import connect
from edgepipe.cli.output import as_dict, print_json, say
from edgepipe.errors import ConfigInvalid
from edgepipe.wire.trust import (
    InviteAnswer,
    InviteAsks,
    InviteCommand,
    InviteEvent,
    InviteFailed,
    InviteJoined,
    InviteOpened,
    InviteStart,
)

_KEY_CHARS = 8  # beginning of a node id: enough to compare by eye
# Names of the events in JSON.
_KINDS = {InviteOpened: "opened", InviteFailed: "failed", InviteAsks: "asks", InviteJoined: "joined"}


async def invite(data_dir: Path, start: InviteStart, *, as_json: bool) -> None:
    """Show the code, ask about each machine that gives it, show the new peer. Raises the error that ends it early."""
    if not (start.accept_all or sys.stdin.isatty()):
        raise ConfigInvalid(
            "a person must confirm that the other machine may join",
            fact="the input is no terminal",
            next_step="edgepipe node invite --yes    (lets in any machine with the code)",
        )
    commands: asyncio.Queue[InviteCommand] = asyncio.Queue()
    commands.put_nowait(InviteCommand(command=start))
    async with connect(data_dir) as admin:
        async for event in admin.invite(_each(commands)):
            if as_json:
                _print_event(event)
            else:
                show(event, start)
            if isinstance(event.event, InviteAsks):
                answer = InviteAnswer(accept=await _accepts(event.event))
                commands.put_nowait(InviteCommand(command=answer))


async def _each(commands: asyncio.Queue[InviteCommand]) -> AsyncIterator[InviteCommand]:
    while True:
        yield await commands.get()


def show(event: InviteEvent, start: InviteStart) -> None:
    """Print an event of an invitation."""
    match event.event:
        case InviteOpened() as opened:
            _show_code(opened, long_string=start.long_string)
        case InviteFailed() as failed:
            who = f"{failed.name or 'a machine'} ({failed.address})"
            say(f"{who}: {failed.error.what}", first="  ✗ ")
            if failed.error.fact:
                say(failed.error.fact, first="    ")
        case InviteAsks() as asks:
            name, key = asks.name, asks.node_id[:_KEY_CHARS]
            say(f"'{name}' ({asks.address}) gave the right code. Its key: {key}", first="  ◀ ")
        case InviteJoined() as joined:
            say(f"'{joined.name}' joined", first="  ✓ ")
            if joined.role == "owner":
                say("It can also manage the cluster if this machine is lost.", first="    ")
            if joined.wanted_name:
                say(f"its own name '{joined.wanted_name}' belongs to another machine", first="    ")
            if joined.silent:
                say(f"it did not confirm; if it does not appear: edgepipe peers remove {joined.name}", first="    ")


def _show_code(opened: InviteOpened, *, long_string: bool) -> None:
    host, _ = host_and_port(opened.address)
    valid = f"{opened.valid_s // 60}:{opened.valid_s % 60:02}"
    if long_string:
        print(f"join string, valid {valid}, for one machine:\n\n  edgepipe node join {opened.code}\n", flush=True)
    else:
        where = host if opened.usual_port else opened.address
        print(f"pairing code:  {opened.code}        valid {valid}, for one machine", flush=True)
        print(f"  on the other machine:   edgepipe node join {opened.code}", flush=True)
        print(f"  not found there?        edgepipe node join --host {where} {opened.code}", flush=True)
    print("waiting ...    (^C ends the invitation)", flush=True)


async def _accepts(asks: InviteAsks) -> bool:
    """Ask whether the machine may join; no answer in time means no."""
    print(f"  ? let it join? [Y/n]  ({asks.at_most_s} s) ", end="", flush=True)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()
    loop.add_reader(sys.stdin, lambda: answer.done() or answer.set_result(sys.stdin.readline()))
    try:
        async with asyncio.timeout(asks.at_most_s):
            line = await answer
    except TimeoutError:
        print("no answer", flush=True)
        return False
    finally:
        loop.remove_reader(sys.stdin)
    return bool(line) and line.strip().lower() in ("", "y", "yes")


def _print_event(event: InviteEvent) -> None:
    print_json({_KINDS[type(event.event)]: as_dict(event.event)})
    with suppress(BrokenPipeError):
        sys.stdout.flush()
