"""What stands on terminals of several widths and alphabets, and in pipes."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pyte
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from edgepipe.cli import inviting, peers
from edgepipe.cli.chat.answer_view import MarkdownView, make_view
from edgepipe.cli.main import main
from edgepipe.cli.output import make_console
from edgepipe.cli.wizard.asking import AskedChoice, Quit, Terminal
from edgepipe.errors import PairingRejected
from edgepipe.ids import NodeId
from edgepipe.wire.trust import InviteEvent, InviteFailed, InviteStart, ListPeersReply, PeerState
from tests.support.daemon.admin_server import FakeNode, answering
from tests.support.processes.command_line import Run

PLAN = ("plan", "qwen2.5-7b", "--emulate", "2x rtx4090", "--link", "1gbit,1ms")


class FakeTerminal(io.TextIOWrapper):
    """A stream that claims to be a terminal and keeps what is written."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        """As a terminal says."""
        return True

    def shown(self) -> str:
        """All of it."""
        return self.bytes.getvalue().decode(self.encoding)


class Emulator(FakeTerminal):
    """A terminal of 24 lines with a screen."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self._screen = pyte.Screen(columns, 24)
        self._stream = pyte.Stream(self._screen)

    def write(self, text: str, /) -> int:
        """Show the text."""
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def lines(self) -> list[str]:
        """What stands there now."""
        return [line.rstrip() for line in self._screen.display if line.strip()]


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Emulator]:
    """A screen so wide, as this process's standard output."""

    def make(columns: int) -> Emulator:
        screen = Emulator(columns)
        for name, value in (("COLUMNS", str(columns)), ("LINES", "24"), ("TERM", "xterm-256color")):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", screen)
        return screen

    return make


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_live_line_says_why_nothing_comes_and_goes_with_the_next_word(
    emulator: Callable[[int], Emulator], columns: int
) -> None:
    screen = emulator(columns)
    with make_view(markdown=True) as view:
        view.wait("reading 1,500 tokens")
        assert screen.lines()[0][1:] == " reading 1,500 tokens"
        view.wait("reading 1,500 tokens, 60 %")
        assert [line[1:] for line in screen.lines()] == [" reading 1,500 tokens, 60 %"]
        view.show("The quick brown fox jumps over the lazy dog. " * 3)
        text = screen.lines()
        assert len(text) == -(-134 // columns)
        view.wait("studio gone since 21:14, continuing ...", news=True)
        assert screen.lines()[:-1] == text
        assert screen.lines()[-1][1:] == " studio gone since 21:14, continuing ..."
        view.show("And it goes on.")
    shown = " ".join(screen.lines())
    assert shown == "The quick brown fox jumps over the lazy dog. " * 3 + "And it goes on."


def test_plain_text_is_broken_only_by_news(emulator: Callable[[int], Emulator]) -> None:
    screen = emulator(80)
    with make_view(markdown=False) as view:
        view.wait("reading 1,500 tokens")
        assert screen.lines() == ["reading 1,500 tokens"]
        view.show("One")
        view.wait("waiting for the next word")
        assert screen.lines() == ["One"]
        view.wait("studio gone since 21:14, continuing ...", news=True)
        assert screen.lines() == ["One", "studio gone since 21:14, continuing ..."]
        view.show("two")
    assert screen.lines() == ["One", "two"]


def test_a_terminal_that_cannot_erase_gets_news_as_lines(
    emulator: Callable[[int], Emulator], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = emulator(80)
    monkeypatch.setenv("TERM", "dumb")
    written = screen.bytes
    monkeypatch.setattr(screen, "write", lambda text: written.write(text.encode()))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with make_view(markdown=False) as view:
        view.wait("waiting for the first word")
        view.show("One")
        for _ in range(2):
            view.wait("studio gone since 21:14, continuing ...", news=True)
        view.show("two")
    assert screen.shown() == "One\nstudio gone since 21:14, continuing ...\ntwo\n"


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_narrow_screen_loses_no_word_of_a_plan(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    def words(width: int) -> set[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        lines = run(*PLAN).out.splitlines()
        assert max(map(len, lines)) <= width
        return {word for word in " ".join(lines).split() if not set(word) <= set("█▓░")}  # one bar fits the width

    assert words(columns) == words(300)
    assert "EXPECTED" in words(columns)


@pytest.mark.parametrize("columns", [60, 80])
def test_a_refused_guest_is_told_without_broken_words(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", screen)
    fact = "1 try left, 0 of them for 192.168.178.101; if you are sure that it was right, someone may be tampering"
    error = PairingRejected("wrong code", fact=fact)
    failed = InviteFailed(name="studio", address="192.168.178.101", error=error)
    inviting.show(InviteEvent(event=failed), InviteStart())
    lines = screen.shown().splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines[1:]).split()) == fact


def test_paths_are_whole_in_a_pipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    path = "/tmp/" + "a-long-folder/" * 8 + "models"
    monkeypatch.setenv("EDGEPIPE_MODELS_DIR", path)
    assert f"models_dir          {path}" in run("config", "show").out


def test_a_terminal_that_is_not_utf8_shows_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeTerminal("latin-1")
    monkeypatch.setattr(sys, "stdout", screen)
    with pytest.raises(SystemExit) as ended:
        main(list(PLAN))
    assert ended.value.code == 0
    assert " · best for one chat" in screen.shown()  # the dot is in that alphabet
    assert "▶" not in screen.shown()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_addresses_and_keys_are_whole_on_every_screen(
    emulator: Callable[[int], Emulator], tmp_path: Path, columns: int
) -> None:
    reply = ListPeersReply(
        cluster_name="home",
        node_id=NodeId("here"),
        peers=tuple(
            PeerState(
                name=name, role="member", state="asleep", address=f"192.168.178.{end}:7117", added_ms=1,
                node_id=NodeId(name * 4), added_by="living-room-gamer",
            )
            for name, end in (("living-room-gamer", 123), ("studio", 124))
        ),
    )  # fmt: skip

    screen = emulator(columns)
    with answering(tmp_path, FakeNode(peers=reply)):
        peers.list_peers(tmp_path)
    text = "\n".join(screen.lines())
    for whole in ("192.168.178.123:7117", "192.168.178.124:7117", "livi", "studiost"):
        assert whole in text
    assert ("LET IN BY" in text) is (columns >= 100), text


def test_code_in_a_sentence_has_no_background(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with MarkdownView(make_console()) as view:
        view.show("type `ls` now")
    assert "ls" in screen.shown()
    assert ";40m" not in screen.shown()


@pytest.mark.parametrize("key", ["\x03", "\x04"])
def test_the_wizard_stops_without_another_library_s_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    asking = Terminal()
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text(key)
        with pytest.raises(Quit):
            asking.text("Name:")
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("\x03")
        with pytest.raises(Quit):
            asking.choose("Which?", [AskedChoice(value="a", text="A")], default="a")
    assert capsys.readouterr().out == ""
