"""What is said while an answer comes, or does not."""

from __future__ import annotations

import asyncio

from edgepipe.cli.chat.answer_view import AnswerView
from edgepipe.cli.chat.conversation import PartialAnswer, stream_answer
from edgepipe.cli.find import Target
from edgepipe.cli.sse import ChatClient, EventContent
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import serving


class Watched(AnswerView):
    """Remembers what was shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.waited = asyncio.Event()

    def show(self, text: str) -> None:
        """A piece."""
        self.shown.append(text)

    def think(self, text: str) -> None:
        """A piece of reasoning."""
        self.shown.append(f"<{text}>")

    def thought(self, seconds: float) -> None:
        """Its end."""
        self.shown.append("<>")

    def wait(self, why: str, *, news: bool = False) -> None:
        """A live line; news with a mark."""
        self.shown.append(f"{'!' * news}({why})")
        self.waited.set()


def test_the_reading_of_a_prompt_and_a_pause_are_told_as_they_happen() -> None:
    view = Watched()
    incoming = PartialAnswer(num_nodes=2, max_tokens=None, view=view)
    incoming.quiet()
    for piece in (
        EventContent(prompt_tokens=1500),
        EventContent(note="reading 60 %"),
        EventContent(note="still working"),
        EventContent(text="One", prompt_tokens=1500, completion_tokens=1),
        EventContent(note="recovering: studio gone since 21:14"),
        EventContent(note="recovering"),
        EventContent(note="studio gone since 21:14; continuing on 1 machine"),
        EventContent(text=" two", prompt_tokens=1500, completion_tokens=2),
    ):
        incoming.take(piece)
    assert view.shown == [
        "(waiting for the first word)",
        "(reading 1,500 tokens)",
        "(reading 1,500 tokens, 60 %)",
        "One",
        "!(studio gone since 21:14, continuing ...)",
        "!(a part of the model is lost, continuing ...)",
        " two",
    ]
    answer = incoming.answer()
    assert (answer.text, answer.num_tokens, answer.num_prompt_tokens) == ("One two", 2, 1500)
    assert "studio gone since 21:14; continuing on 1 machine" in answer.footer()


def test_reasoning_ends_where_the_answer_begins_or_breaks_off() -> None:
    view = Watched()
    incoming = PartialAnswer(num_nodes=1, max_tokens=None, view=view)
    for piece in (
        EventContent(reasoning="Let"),
        EventContent(reasoning=" me"),
        EventContent(text="yes"),
        EventContent(reasoning="But"),
    ):
        incoming.take(piece)
    assert view.shown == ["<Let>", "< me>", "<>", "yes", "<But>"]
    incoming.end_reasoning()
    incoming.end_reasoning()
    assert view.shown[5:] == ["<>"]
    answer = incoming.answer()
    assert (answer.text, answer.reasoning) == ("yes", "Let meBut")
    assert answer.thought_s > 0


async def test_nobody_waits_long_without_a_sign() -> None:
    engine, view = FakeEngine(answer=b"yes", hold_after=0), Watched()
    async with asyncio.timeout(20), serving(engine) as served:
        target = Target(base_url=str(served.http.base_url), model="tiny")
        async with ChatClient(target.base_url) as client:
            incoming = PartialAnswer(num_nodes=1, max_tokens=None, view=view, slow_start_s=0.01, slow_word_s=0.01)
            question = [{"role": "user", "content": "x"}]
            work = asyncio.ensure_future(stream_answer(client, target, question, {}, incoming))
            await view.waited.wait()
            assert view.shown == ["(waiting for the first word)"]
            engine.release.set()
            await work
    assert "".join(text for text in view.shown if not text.startswith("(")) == "yes"
