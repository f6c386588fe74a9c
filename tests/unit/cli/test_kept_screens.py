"""Screens of the setup, the chat and the status at 40, 80 and 120 columns, compared with kept ones.

The kept screens are ``tests/data/screens/NAME-COLUMNS.txt``. To renew one after a wanted change: delete it, run this
test, which writes it and fails, and read it.
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from edgepipe.cli.chat.answer_view import MarkdownView
from edgepipe.cli.chat.slash import COMMANDS
from edgepipe.cli.output import make_console
from edgepipe.cli.views.status_view import render_status
from edgepipe.cli.wizard import own_node, steps
from edgepipe.cli.wizard.asking import Defaults
from edgepipe.cli.wizard.state import Given, Setup
from edgepipe.config import load_config
from edgepipe.ids import NodeId
from edgepipe.wire.engines import Advice
from edgepipe.wire.nodes import AbsentNode
from tests.support.processes.command_line import make_status

KEPT = Path(__file__).parents[2] / "data" / "screens"
NOON_S = time.mktime((2026, 3, 4, 12, 7, 0, 0, 0, -1))
ANSWER = """# Tides

The **moon** pulls the water on its near side more than the earth as a whole, and that less than the water behind it.

- spring tide: sun and moon in one line
- neap tide: at a right angle

```python
hours = 12.42
```
"""


def _status(_monkeypatch: pytest.MonkeyPatch, _tmp_path: Path) -> None:
    status = make_status()
    stopped = AbsentNode(node_id=NodeId("n7"), name="attic", state="left", since_us=int((NOON_S - 3600) * 1e6))
    advice = Advice(
        why="stage studio takes 62.0 ms instead of 31.0 ms", plan="gamer:0-78,studio:79-79", gain=0.21, pause_s=4.0
    )
    engines = (replace(status.engines[0], advice=advice), *status.engines[1:])
    console = make_console()
    for part in render_status(replace(status, absent=(stopped,), engines=engines)):
        console.print(part)


def _chat(_monkeypatch: pytest.MonkeyPatch, _tmp_path: Path) -> None:
    with MarkdownView(make_console()) as view:
        view.thought(4.0)
        view.show(ANSWER)

    async def ask_for_help() -> None:
        await COMMANDS["/help"].run(cast("Any", None), "")

    asyncio.run(ask_for_help())


def _setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(data_dir: Path, flags: tuple[str, ...], *, name: str) -> dict[str, Any]:
        return {"pid": 1, "address": "10.0.0.1:7117"}

    monkeypatch.setattr(steps, "machine_findings", lambda _config: ())  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(steps, "network_facts", lambda _config: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(steps, "network_findings", lambda _facts, _ports: ())  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(own_node, "node_status", lambda _setup: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(steps, "_status_with_peers", lambda _setup: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(own_node, "start_in_background", start)
    monkeypatch.setattr("edgepipe.cli.service.manager_runs", lambda: False)
    given = Given(name="gamer", cluster="home", skip_model=True)
    config = load_config({"data_dir": tmp_path}, environ={}).values
    setup = Setup(asking=Defaults(), given=given, config=config, settings_file=tmp_path / "config.toml")
    for step in steps.STEPS:
        step(setup)
    steps.show_end(setup)


SCREENS: dict[str, Callable[[pytest.MonkeyPatch, Path], None]] = {"status": _status, "chat": _chat, "setup": _setup}


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_the_kept_one(name: str, columns: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = io.StringIO()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(time, "time", lambda: NOON_S)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, shown)
    monkeypatch.setattr(shown, "isatty", lambda: False)
    monkeypatch.setattr("rich.console.Console.width", columns)
    SCREENS[name](monkeypatch, tmp_path)
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    text = "\n".join(lines).strip("\n") + "\n"
    kept = KEPT / f"{name}-{columns}.txt"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text, encoding="utf-8")
        pytest.fail(f"{kept} was missing and is written now: read it")
    assert text == kept.read_text(encoding="utf-8")
    assert max(map(len, lines)) <= columns
