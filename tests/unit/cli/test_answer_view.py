"""How an answer is drawn while it comes."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from edgepipe.cli.chat.answer_view import MarkdownView, PlainView, make_view, split_blocks

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


def drawn(pieces: list[str], *, height: int = 24) -> str:
    """What stands on a terminal of 80 columns in the end, by a real emulator."""
    import pyte

    screen = pyte.HistoryScreen(80, height, history=1000, ratio=0.5)
    stream = pyte.Stream(screen)

    class Out(io.StringIO):
        def write(self, text: str, /) -> int:
            stream.feed(text.replace("\n", "\r\n"))
            return len(text)

    console = Console(file=Out(), force_terminal=True, width=80, height=height, highlight=False, emoji=False)
    with MarkdownView(console, redraw_s=0.0) as view:
        for piece in pieces:
            view.show(piece)
    above = ["".join(line[column].data for column in range(80)) for line in screen.history.top]
    lines = [line.rstrip() for line in [*above, *screen.display]]
    return "\n".join(line for line in lines if line)  # blocks drawn one by one stand further apart


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
