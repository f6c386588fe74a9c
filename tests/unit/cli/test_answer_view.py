"""How an answer is drawn while it comes."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from edgepipe.cli.chat.answer_view import MarkdownView, PlainView, Thinking, make_view, split_blocks

if TYPE_CHECKING:
    from pyte import HistoryScreen

ANSWER = """# Title

Some **bold** words
over two lines.

```python
a = 1

b = 2
```

- one

- two

Last.
"""


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("a\n\n", ""),  # a list might follow and belong to it
        ("a\n\nb", "a\n\n"),
        ("- a\n\n- b", ""),
        ("- a\n\n  b", ""),
        ("- a\n\nb", "- a\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n", "```\na\n\nb\n```\n"),
        ("````\n```\n\nx\n````\ny", "````\n```\n\nx\n````\n"),
        ("~~~\n```\n\n~~~\nx", "~~~\n```\n\n~~~\n"),
    ],
)
def test_only_what_later_text_cannot_change_is_finished(text: str, finished: str) -> None:
    assert split_blocks(text) == (finished, text.removeprefix(finished))


@given(st.lists(st.sampled_from(["a", "\n", "\n\n", "```", "- ", "1. ", "    ", "~~~", "# "]), max_size=30))
def test_pieces_lose_nothing(pieces: list[str]) -> None:
    printed = rest = ""
    for piece in pieces:
        finished, rest = split_blocks(rest + piece)
        printed += finished
    assert printed + rest == "".join(pieces)


def drawn(
    pieces: list[str],
    *,
    height: int = 24,
    thinking: Thinking = "fold",
    thoughts: list[str] | None = None,
    thought_s: float = 4,
) -> str:
    """What stands on a terminal of 80 columns in the end, by a real emulator; without pieces, amid the thoughts."""
    import pyte

    screen = pyte.HistoryScreen(80, height, history=1000, ratio=0.5)
    stream = pyte.Stream(screen)

    class Out(io.StringIO):
        def write(self, text: str, /) -> int:
            stream.feed(text.replace("\n", "\r\n"))
            return len(text)

    console = Console(file=Out(), force_terminal=True, width=80, height=height, highlight=False, emoji=False)
    with MarkdownView(console, thinking=thinking, redraw_s=0.0) as view:
        for thought in thoughts or ():
            view.think(thought)
        amid = screen_lines(screen)
        if thoughts and pieces:
            view.thought(thought_s)
        for piece in pieces:
            view.show(piece)
    lines = screen_lines(screen) if pieces else amid
    return "\n".join(line for line in lines if line)  # blocks drawn one by one stand further apart


def screen_lines(screen: HistoryScreen) -> list[str]:
    """The lines that scrolled away, then those on the screen."""
    above = ["".join(line[column].data for column in range(80)) for line in screen.history.top]
    return [line.rstrip() for line in [*above, *screen.display]]


def test_markdown_piece_by_piece_looks_like_markdown_at_once() -> None:
    at_once = drawn([ANSWER])
    assert drawn(list(ANSWER)) == at_once
    assert "**" not in at_once
    assert "```" not in at_once
    for words in ("Title", "Some bold words over two lines.", "a = 1", "• two", "Last."):
        assert at_once.count(words) == 1


def test_a_block_longer_than_the_screen_is_there_once() -> None:
    text = "```\n" + "".join(f"line {number:02d}\n" for number in range(60)) + "```\n"
    shown = drawn([text[start : start + 7] for start in range(0, len(text), 7)], height=12)
    assert [shown.count(f"line {number:02d}") for number in range(60)] == [1] * 60


def test_a_long_paragraph_word_by_word_is_there_once() -> None:
    words = [f"word{number:03d} " for number in range(120)]
    shown = drawn(words)
    assert [shown.count(word.strip()) for word in words] == [1] * 120


def test_plain_text_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(make_view(markdown=True), PlainView)  # nobody looks at a terminal here
    with PlainView() as view:
        view.show("a\x1b[2J\tb\n**c**")
    assert capsys.readouterr().out == "a\\x1b[2J\tb\n**c**\n"


THOUGHTS = [f"word{number:03d}{' ' if number % 7 else chr(10)}" for number in range(300)]


def test_reasoning_folds_into_a_line_when_it_ends() -> None:
    amid = drawn([], thoughts=THOUGHTS).splitlines()
    assert len(amid) == 7  # six lines of reasoning, then the spinner's
    assert "word299" in amid[-2]
    assert amid[-1].endswith("thinking")
    assert drawn(["One.\n\n", "Two."], thoughts=THOUGHTS).splitlines() == ["thought for 4.0 s", "One.", "Two."]


def test_reasoning_to_show_is_there_once_before_the_answer() -> None:
    shown = drawn(["One."], thoughts=THOUGHTS, thinking="show", height=12, thought_s=75)
    assert [shown.count(word.strip()) for word in THOUGHTS] == [1] * len(THOUGHTS)
    assert shown.splitlines()[-2:] == ["thought for 1 min 15 s", "One."]


def test_hidden_reasoning_leaves_no_line() -> None:
    assert drawn([], thoughts=THOUGHTS, thinking="hide")[1:] == " thinking"
    assert drawn(["One."], thoughts=THOUGHTS, thinking="hide") == "One."


def test_reasoning_cannot_move_the_cursor() -> None:
    assert "\\x1b[2J" in drawn(["One."], thoughts=["a\x1b[2J"], thinking="show")


@pytest.mark.parametrize("thinking", ["fold", "show", "hide"])
def test_a_pipe_gets_the_answer_alone(thinking: Thinking, capsys: pytest.CaptureFixture[str]) -> None:
    with make_view(markdown=True, thinking=thinking) as view:
        view.think("Let me")
        view.think(" see.")
        view.thought(4)
        view.show("yes")
    shown = capsys.readouterr()
    assert shown.out == "yes\n"
    assert shown.err == ("Let me see.\nthought for 4.0 s\n\n" if thinking == "show" else "")


def test_plain_text_on_a_terminal_folds_reasoning_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with make_view(markdown=False) as view:
        view.think("Let me see.")
        view.thought(0.25)
        view.show("yes")
    shown = capsys.readouterr().out
    assert "Let me" not in shown
    assert shown.startswith("thinking")
    assert shown.rpartition("\x1b[K")[2].replace("\x1b[2m", "").replace("\x1b[0m", "") == "thought for 250 ms\nyes\n"
