"""The conversation in the terminal, keys in and text out, over a gateway and a fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from edgepipe.cli.chat.answer_view import PlainView
from edgepipe.cli.chat.conversation import ChatSettings
from edgepipe.cli.chat.repl import converse
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.text.conversations.traits import ModelTraits, TemplateTraits
from edgepipe.wire.nodes import ClusterStatus
from edgepipe.wire.v1 import node_pb2 as pb
from tests.support.daemon.admin_server import FakeNode, answering
from tests.support.gateways.fake_engine import CONTEXT, ByteAssets, FakeEngine
from tests.support.gateways.server import Served, serving
from tests.support.processes.command_line import make_engine, make_member, make_status

PASTE_BEGINS, PASTE_ENDS = "\x1b[200~", "\x1b[201~"
CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"


class ViewUntil(PlainView):
    """Tells when a text has been shown."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self._wanted, self._shown = wanted, ""
        self.reached = asyncio.Event()

    def show(self, text: str) -> None:
        """Print the piece."""
        super().show(text)
        self._shown += text
        if self._wanted in self._shown:
            self.reached.set()


class ThinkingAssets(ByteAssets):
    """A template that repeats the reasoning of earlier turns."""

    traits = ModelTraits(plain=TemplateTraits(switches=frozenset({"enable_thinking"})))
    chat = detect_format("<think>")

    async def render(self, messages: Sequence[Mapping[str, Any]], **keywords: Any) -> str:
        parts = (f"({message.get('reasoning_content', '')}) {message['content']}" for message in messages)
        return f"[{keywords.get('enable_thinking', True)}] " + " | ".join(parts)


class LoadingNode(FakeNode):
    """Loads a model until the caller leaves."""

    asked = threading.Event()

    def Serve(self, request: pb.ServeRequest, context: Any) -> Iterator[pb.ServeEvent]:
        yield pb.ServeEvent(message="loading")
        left = threading.Event()
        context.add_callback(left.set)
        self.asked.set()
        left.wait(20)


@asynccontextmanager
async def conversation(
    engine: FakeEngine,
    tmp_path: Path,
    view: PlainView | None = None,
    assets: type[ByteAssets] = ByteAssets,
    node_class: type[FakeNode] = FakeNode,
) -> AsyncIterator[tuple[Served, PipeInput, asyncio.Task[None]]]:
    """A running conversation: what is served, its keyboard, its task."""
    async with serving(engine, load=lambda path: assets()) as served:
        member = make_member("a")
        node = replace(member.node, http_port=served.http.base_url.port)
        status = ClusterStatus(
            node_id=node.node_id,
            members=(replace(member, node=node, self=True),),
            engines=(make_engine("tiny", stages=make_status().engines[0].stages),),
        )
        with (
            answering(tmp_path, node_class(status=status)),
            create_pipe_input() as keys,
            create_app_session(input=keys, output=DummyOutput()),
        ):
            settings = ChatSettings(data_dir=tmp_path, model="", max_tokens=40)
            task = asyncio.create_task(converse(settings, new_view=None if view is None else lambda _: view))
            async with asyncio.timeout(20):
                yield served, keys, task


async def test_questions_and_answers_are_remembered_until_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with conversation(FakeEngine(answer=b"yes"), tmp_path) as (served, keys, task):
        keys.send_text(f"one\rtwo{ALT_ENTER}lines\r/clear\r/help\r/what\rthree\r{CTRL_D}")
        await task
        prompts = [bytes(submit.prompt).decode() for submit in served.engine.submits]
    assert prompts == [
        "user: one\nassistant:",
        "user: one\nassistant: yes\nuser: two\nlines\nassistant:",
        "user: three\nassistant:",
    ]
    shown = capsys.readouterr()
    assert shown.out.count("yes") == 3
    assert "4 tok" in shown.err
    assert "2 nodes" in shown.err
    assert "/bye" in shown.err
    assert "there is no /what" in shown.err
    assert "+one" in (tmp_path / "chat_history").read_text()
    assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0


async def test_figures_stand_below_the_complete_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class LateView(PlainView):
        """Draws the last block when the answer is over, as Markdown is drawn."""

        def __exit__(self, *exc_info: object) -> None:
            sys.stderr.write("the last block\n")

    async with conversation(FakeEngine(answer=b"yes"), tmp_path, LateView()) as (_, keys, task):
        keys.send_text(f"one\r{CTRL_D}")
        await task
    answer, _, figures = capsys.readouterr().err.partition("the last block")
    assert "tok" not in answer
    assert "4 tok" in figures


async def test_slash_commands_change_what_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with conversation(FakeEngine(answer=b"yes"), tmp_path) as (served, keys, task):
        keys.send_text('/system be brief\r/set max_tokens 2\r"""one\r\rmore"""\r/regenerate\r')
        keys.send_text("/stats\r/save trip\r/clear\r/load trip\r/set nonsense 1\r/regenerate\r/bye\r")
        await task
        prompts = [bytes(submit.prompt).decode() for submit in served.engine.submits]
        limits = [submit.max_tokens for submit in served.engine.submits]
    assert prompts == ["system: be brief\nuser: one\n\nmore\nassistant:"] * 3
    assert limits == [2, 2, 2]
    shown = capsys.readouterr()
    assert shown.out == "ye\n" * 3
    assert "session  2 answers · 4 tok" in shown.err
    assert "saved in" in shown.err
    assert "1 question loaded" in shown.err
    assert "unknown setting 'nonsense'" in shown.err


async def test_a_full_context_offers_a_way_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with conversation(FakeEngine(answer=b"yes"), tmp_path) as (served, keys, task):
        first, second, third = "a" * 2000, "b" * 1500, "c" * 2000
        pastes = [f"{PASTE_BEGINS}{text}{PASTE_ENDS}\r" for text in (first, second, third)]
        keys.send_text("".join([*pastes, "/set history drop\r", pastes[-1], "more\r/bye\r"]))
        await task
        prompts = [bytes(submit.prompt).decode() for submit in served.engine.submits]
    turns = f"user: {second}\nassistant: yes\nuser: {third}\nassistant:"
    assert [prompt[6] for prompt in prompts] == ["a", "a", "b", "b"]
    assert prompts[2:] == [turns, f"{turns} yes\nuser: more\nassistant:"]
    shown = capsys.readouterr().err
    assert "error: the conversation no longer fits into the model's context" in shown
    assert "/clear    (or drop the oldest questions: /set history drop)" in shown
    assert shown.count("the context is full: left out the oldest question and its answer") == 1


async def test_an_answer_that_the_context_ends_is_not_cut_by_max_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with conversation(FakeEngine(answer=b"a long story"), tmp_path) as (served, keys, task):
        text = "a" * (CONTEXT - len("user: \nassistant:") - 5)
        keys.send_text(f"{PASTE_BEGINS}{text}{PASTE_ENDS}\r/set history drop\rb\r/bye\r")
        await task
        prompts = [bytes(submit.prompt).decode() for submit in served.engine.submits]
    shown = capsys.readouterr()
    assert shown.out == "a lon\na long story\n"
    assert "5 tok" in shown.err
    assert "cut: the context is full" in shown.err
    assert "max tokens" not in shown.err
    assert prompts[1] == "user: b\nassistant:"


async def test_words_are_drawn_unless_somebody_asks_for_the_likeliest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with conversation(FakeEngine(answer=b"yes"), tmp_path) as (served, keys, task):
        keys.send_text("one\r/set\r/set temperature 0\rtwo\r/set temperature default\rthree\r/bye\r")
        await task
        temperatures = [submit.sampling.temperature for submit in served.engine.submits]
    assert temperatures == pytest.approx([0.8, 0.0, 0.8])
    assert "temperature 0.8 (default)" in capsys.readouterr().err


async def test_an_interrupt_stops_the_answer_and_not_the_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, view = FakeEngine(answer=b"a long story", hold_after=6), ViewUntil("a long")

    async with conversation(engine, tmp_path, view) as (served, keys, task):
        keys.send_text("tell\r")
        await view.reached.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await served.engine.cancelled.wait()
        served.engine.release.set()
        keys.send_text(f"{CTRL_C}/stats\ragain\r/bye\r")
        await task
    shown = capsys.readouterr().err
    assert "stopped" in shown
    assert "session  1 answer · 6 tok" in shown
    assert len(served.engine.submits) == 2


async def test_an_interrupt_while_another_model_loads_keeps_the_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with conversation(FakeEngine(answer=b"yes"), tmp_path, node_class=LoadingNode) as (served, keys, task):
        keys.send_text("one\r/model other\r")
        assert await asyncio.to_thread(LoadingNode.asked.wait, 15)
        os.kill(os.getpid(), signal.SIGINT)
        keys.send_text(f"two\r{CTRL_D}")
        await task
        prompts = [bytes(submit.prompt).decode() for submit in served.engine.submits]
    assert prompts[1:] == ["user: one\nassistant: yes\nuser: two\nassistant:"]
    assert "stopped" in capsys.readouterr().err


async def test_an_error_is_shown_and_the_conversation_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with conversation(FakeEngine(answer=b"ok"), tmp_path) as (served, keys, task):
        keys.send_text(f"{PASTE_BEGINS}{'x' * 5000}{PASTE_ENDS}\rshort\r{CTRL_D}")
        await task
    shown = capsys.readouterr()
    assert "This model's maximum context length is" in shown.err
    assert bytes(served.engine.submits[-1].prompt) == b"user: short\nassistant:"


async def test_reasoning_goes_back_to_the_template_and_not_into_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(answer=b"<think>Let me see.</think>\n\nyes")
    async with conversation(engine, tmp_path, assets=ThinkingAssets) as (served, keys, task):
        keys.send_text("one\r/think\r/think show\r/set reasoning_effort none\rtwo\r/think loud\r/bye\r")
        await task
        prompts = [bytes(submit.prompt).decode() for submit in served.engine.submits]
    assert prompts == ["[True] () one", "[False] () one | (Let me see.) yes | () two"]
    shown = capsys.readouterr()
    assert shown.out == "yes\n" * 2
    first, _, second = shown.err.partition("reasoning_effort none")
    assert first.count("Let me see.") == 1  # as /think shows it
    assert second.count("Let me see.\nthought for") == 1
    assert "it can be fold, show, hide" in second
