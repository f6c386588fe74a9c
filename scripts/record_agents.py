"""Record a chat of a coding agent: ``PYTHONPATH=. .venv/bin/python scripts/record_agents.py PROGRAM``.

The real program works on a small project, with an engine that answers by a script. Its requests become
``tests/data/clients/chats/PROGRAM.json``. Texts of the program's makers are cut, and folders, hosts and identities get
other names, the same ones in every request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tests.support.gateways.agent_chats import FOLDER, SCRIPT, cut
from tests.support.gateways.agent_programs import AgentEngine, agents_gateway, calls, run_agent

QUESTIONS = ("Find out what the project prints.", "Greet in the morning, too.", "Thanks. Is all of it tested?")
KEPT_CHARS = 160  # characters kept of a text of the program's makers
SHORT_CHARS = 400  # texts up to here stay whole
HEADERS = ("anthropic-version", "anthropic-beta", "user-agent")
IDENTITY = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|\b[0-9a-f]{64}\b")


@dataclass(frozen=True, slots=True)
class Request:
    """What the program sent."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass(slots=True)
class Tap:
    """Passes connections on to a gateway, and keeps the requests in their order."""

    port: int  # port of the gateway
    requests: list[Request] = field(default_factory=list[Request])

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        back = asyncio.create_task(_pass(far_reader, writer))
        held = bytearray()
        try:
            while data := await reader.read(1 << 16):
                held += data
                self._take(held)
                far_writer.write(data)
        except OSError:
            pass
        far_writer.close()
        await back

    def _take(self, held: bytearray) -> None:
        """Keep the requests that have come whole, and remove them from ``held``."""
        while (end := held.find(b"\r\n\r\n")) >= 0:
            first, *lines = held[:end].decode().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            whole = end + 4 + int(headers.get("content-length", 0))
            if len(held) < whole:
                return
            if first.startswith("POST "):
                self.requests.append(Request(first.split()[1], headers, json.loads(held[end + 4 : whole])))
            del held[:whole]


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()


class Names:
    """Other names for what tells of a machine, the same one for each."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._known: dict[str, str] = {}

    def replaced(self, value: Any) -> Any:
        """Return a value with other names in its texts, long texts cut."""
        if isinstance(value, str):
            text = IDENTITY.sub(self._identity, value.replace(self._folder, "/home/user/project"))
            is_long = len(text) > SHORT_CHARS and not text.startswith("{")
            return cut(text, KEPT_CHARS, hashlib.sha256(text.encode()).hexdigest()) if is_long else text
        if isinstance(value, dict):
            return {name: self.replaced(each) for name, each in cast("dict[str, Any]", value).items()}
        return [self.replaced(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value

    def _identity(self, found: re.Match[str]) -> str:
        return self._known.setdefault(found[0], f"identity-{len(self._known)}")


async def record(program: str, folder: Path) -> list[Request]:
    """Return the requests of a chat: those with tools."""
    engine = AgentEngine(group=50)
    async with agents_gateway(engine) as url:
        tap = Tap(int(url.rpartition(":")[2]))
        server = await asyncio.start_server(tap.accept, "127.0.0.1", 0)
        own_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for number, (question, turns) in enumerate(zip(QUESTIONS, SCRIPT, strict=True)):
            engine.script = [_written(program, turn.thought, turn.text, turn.calls(program)) for turn in turns]
            engine.asked = 0
            ended = await run_agent(program, question, folder=folder, url=own_url, again=number > 0)
            print(f"{question}\n{ended.printed}", file=sys.stderr)
        server.close()
    return [request for request in tap.requests if request.body.get("tools")]


def _written(program: str, thought: str, text: str, named: Iterable[tuple[str, dict[str, Any]]]) -> bytes:
    """Return a turn as the model writes it."""
    reasoning = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    listed = list(named)
    return f"{reasoning}{text}".encode() + (b"\n" if text and listed else b"") + calls(*listed)


def main() -> None:
    """Record one program."""
    program = sys.argv[1]
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    number = re.search(r"\d+\.\d+\.\d+", version)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        (folder / "greet.py").write_text("print('Hello')\n", encoding="utf-8")
        requests = asyncio.run(record(program, folder))
        names = Names(folder)
        bodies = [names.replaced(request.body) for request in requests]
    tools = bodies[0]["tools"]
    if len({json.dumps(body.pop("tools")) for body in bodies}) > 1:
        sys.exit("the tools are not the same in all requests")
    chat = {
        "program": f"{program} {number[0] if number else ''}",
        "path": requests[0].path,
        "headers": {name: value for name, value in requests[0].headers.items() if name in HEADERS},
        "tools": tools,
        "requests": bodies,
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{program}.json").write_text(json.dumps(chat, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{len(bodies)} requests")


if __name__ == "__main__":
    main()
