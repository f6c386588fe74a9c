"""An engine of engine.proto without a model: its tokens are bytes, its answer a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from edgepipe.errors import EdgepipeError, PeerClosed
from edgepipe.gateway.formats.chat_format import ChatFormat
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.ids import EngineId, Epoch, PipelineId
from edgepipe.link.channels import bind, make_server
from edgepipe.security.mutual_tls import Plaintext
from edgepipe.text.conversations.traits import ModelTraits, TemplateTraits
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.engines import EngineState
from edgepipe.wire.errors import error_to_wire
from edgepipe.wire.nodes import ClusterView, ServedModel
from edgepipe.wire.v1 import common_pb2, engine_pb2, engine_pb2_grpc

END = 256  # the one special token of the byte alphabet
CONTEXT = 4096


class ByteDetokenizer:
    """Bytes to text; holds back an unfinished character."""

    def __init__(self) -> None:
        self._held = b""

    def add(self, token: int) -> str:
        if token == END:
            return ""
        self._held += bytes([token])
        try:
            text = self._held.decode()
        except UnicodeDecodeError as exc:
            if len(self._held) - exc.start < 4 and exc.reason == "unexpected end of data":
                return ""
            text = self._held.decode(errors="replace")
        self._held = b""
        return text

    def finish(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


_LINES = TemplateTraits(developer="system", systems="joined", tools="text", calls="text", results="user")


class ByteAssets:
    """A byte-level tokenizer and a template of one line per turn."""

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        return list(text.encode())

    async def encode_long(
        self, text: str, *, special_tokens: bool, at_most: int, owner: str = ""
    ) -> tuple[int, list[int]]:
        ids = self.encode(text, special_tokens=special_tokens)
        return len(ids), ids if len(ids) <= at_most else []

    vocab_size = 257
    sampling: Mapping[str, float] = MappingProxyType({})
    traits = ModelTraits(plain=_LINES, with_tools=_LINES)
    chat: ChatFormat = detect_format("lines")

    def new_decoder(self) -> ByteDetokenizer:
        return ByteDetokenizer()

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == END else bytes([token])

    def token_text(self, token: int) -> str:
        return "<end>" if token == END else bytes([token]).decode(errors="replace")

    def new_detokenizer(self, *, keep: Collection[str] = (), before: Sequence[int] = ()) -> ByteDetokenizer:
        detokenizer = ByteDetokenizer()
        for token in before:
            detokenizer.add(token)
        return detokenizer

    def info(self) -> dict[str, Any]:
        return {"eos_token": "<end>", "chat_template": "lines"}

    async def render(self, messages: Sequence[Mapping[str, Any]], *, owner: str = "", **keywords: Any) -> str:
        shown = "".join(f"[{name}={value}]" for name, value in sorted(keywords.items()))
        return shown + "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"

    async def close(self) -> None:
        return None


@dataclass(slots=True)
class FakeEngine(engine_pb2_grpc.EngineServicer):
    """Answers every request with ``answer``, ``group`` tokens a message."""

    answer: bytes = b"The capital of France is Paris."
    group: int = 1
    pause_s: float = 0.0  # between two messages
    read_tokens: int = 0  # tokens read of each prompt, reported before the answer
    hold_after: int | None = None  # tokens; then nothing more comes until ``release``
    error: EdgepipeError | None = None  # ends requests after ``hold_after`` tokens, or at once
    engine_id: str = "engine-1"
    forgets: bool = False  # what is resumed
    max_running: int = 1 << 20  # choices at a time; further requests wait in order of arrival
    num_running: int = 0  # choices
    most_running: int = 0  # choices at a time so far
    entrance: asyncio.Lock = field(default_factory=asyncio.Lock)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    submits: list[engine_pb2.Submit] = field(default_factory=list)
    cancels: list[engine_pb2.Cancel] = field(default_factory=list)
    resumes: list[engine_pb2.Resume] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    break_stream: asyncio.Event = field(default_factory=asyncio.Event)
    num_streams: int = 0

    async def Generate(
        self, request_iterator: AsyncIterator[engine_pb2.GatewayMessage], context: Any
    ) -> AsyncIterator[engine_pb2.EngineEvent]:
        self.num_streams += 1
        outbox: asyncio.Queue[engine_pb2.EngineEvent | None] = asyncio.Queue()
        first = await anext(request_iterator)
        assert first.WhichOneof("message") == "hello"
        yield engine_pb2.EngineEvent(
            welcome=engine_pb2.Welcome(
                hello=hello_to_wire(Hello(role="engine")),
                epoch=common_pb2.Epoch(counter=1, engine_id=self.engine_id),
            )
        )
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        breaker = asyncio.create_task(self._break(outbox))
        try:
            while (event := await outbox.get()) is not None:
                yield event
        finally:
            reader.cancel()
            breaker.cancel()

    async def Describe(self, request: engine_pb2.DescribeEngine, context: Any) -> engine_pb2.EngineState:
        return engine_pb2.EngineState(state="ready")

    async def Trace(self, request: engine_pb2.TraceEngine, context: Any) -> engine_pb2.EngineTrace:
        return engine_pb2.EngineTrace()

    async def _break(self, outbox: asyncio.Queue[engine_pb2.EngineEvent | None]) -> None:
        await self.break_stream.wait()
        self.break_stream.clear()
        outbox.put_nowait(None)

    async def _read(
        self,
        messages: AsyncIterator[engine_pb2.GatewayMessage],
        outbox: asyncio.Queue[engine_pb2.EngineEvent | None],
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            async for message in messages:
                kind = message.WhichOneof("message")
                if kind == "submit":
                    self.submits.append(message.submit)
                    self.submitted.set()
                    have = [len(choice.ids) for choice in message.submit.generated] or [0] * message.submit.num_choices
                    tasks.create_task(self._answer(message.submit, have, outbox))
                elif kind == "resume":
                    self.resumes.append(message.resume)
                    if self.forgets:
                        outbox.put_nowait(
                            ended_event(message.resume, 0, 0, "error", PeerClosed("the engine forgot it"))
                        )
                        continue
                    known = next(s for s in self.submits if s.request_id == message.resume.request_id)
                    tasks.create_task(self._answer(known, list(message.resume.have), outbox))
                elif kind == "cancel":
                    self.cancels.append(message.cancel)
                    self.cancelled.set()

    async def _answer(
        self, submit: engine_pb2.Submit, have: Sequence[int], outbox: asyncio.Queue[engine_pb2.EngineEvent | None]
    ) -> None:
        async with self.entrance:
            while self.num_running + submit.num_choices > self.max_running:
                self.left.clear()
                await self.left.wait()
            self.num_running += submit.num_choices
            self.most_running = max(self.most_running, self.num_running)
        if submit.sampling.prompt_logprobs:
            outbox.put_nowait(_prompt_scores(submit))
        if self.read_tokens:
            outbox.put_nowait(_prompt_read(submit, self.read_tokens))
        whole = list(self.answer[: submit.max_tokens])
        finished = len(self.answer) >= submit.max_tokens
        for choice, start in enumerate(have):
            position = start
            while position < len(whole):
                if self.hold_after is not None and position >= self.hold_after:
                    if self.error is not None:
                        break
                    await self.release.wait()
                ids = whole[position : position + self.group]
                outbox.put_nowait(tokens_event(submit, choice, position, ids))
                position += len(ids)
                await asyncio.sleep(self.pause_s)
            if self.error is None and not finished:
                outbox.put_nowait(tokens_event(submit, choice, position, [END]))
                position += 1
            outbox.put_nowait(ended_event(submit, choice, position, "length" if finished else "stop", self.error))
            self.num_running -= 1
            self.left.set()


def tokens_event(submit: engine_pb2.Submit, choice: int, position: int, ids: list[int]) -> engine_pb2.EngineEvent:
    """The event that brings tokens."""
    tokens = engine_pb2.Tokens(
        request_id=submit.request_id, attempt=submit.attempt, choice=choice, position=position, ids=ids
    )
    if submit.sampling.logprobs:
        tokens.logprobs.extend(_scores(submit, ids))
    return engine_pb2.EngineEvent(tokens=[tokens])


def _scores(submit: engine_pb2.Submit, ids: Sequence[int]) -> list[common_pb2.TokenLogprobs]:
    """Of every token -0.5; of the alternatives, the ids from 65 on, -1, -2, ..."""
    top = range(submit.sampling.top_logprobs)
    return [
        common_pb2.TokenLogprobs(logprob=-0.5, top_ids=[65 + i for i in top], top_logprobs=[-1.0 - i for i in top])
        for _ in ids
    ]


def _prompt_scores(submit: engine_pb2.Submit) -> engine_pb2.EngineEvent:
    scores = engine_pb2.PromptScores(request_id=submit.request_id, attempt=submit.attempt, position=1)
    scores.logprobs.extend(_scores(submit, submit.prompt[1:]))
    return engine_pb2.EngineEvent(prompt_scores=[scores])


def _prompt_read(submit: engine_pb2.Submit, num_tokens: int) -> engine_pb2.EngineEvent:
    read = engine_pb2.PromptRead(request_id=submit.request_id, attempt=submit.attempt, num_tokens=num_tokens)
    return engine_pb2.EngineEvent(prompt_reads=[read])


def ended_event(
    submit: engine_pb2.Submit | engine_pb2.Resume,
    choice: int,
    num_tokens: int,
    reason: str,
    error: EdgepipeError | None,
) -> engine_pb2.EngineEvent:
    """The event that ends a choice."""
    ended = engine_pb2.Ended(
        request_id=submit.request_id,
        attempt=submit.attempt,
        choice=choice,
        reason="error" if error else reason,
        num_tokens=num_tokens,
    )
    if error is not None:
        ended.error.CopyFrom(error_to_wire(error))
    return engine_pb2.EngineEvent(ended=[ended])


async def start_engine(engine: FakeEngine, *, port: int = 0) -> tuple[Any, str]:
    """A running server and its address."""
    server = make_server(Plaintext())
    engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
    bound = bind(server, Plaintext(), host="127.0.0.1", port=port)
    await server.start()
    return server, f"127.0.0.1:{bound}"


def view_of(
    *addresses: str,
    names: Sequence[str] = ("tiny",),
    state: str = "ready",
    error: EdgepipeError | None = None,
    loadable: Sequence[str] = (),
) -> ClusterView:
    """What a daemon tells of engines at these addresses, and of models that a request loads."""
    engines = [
        EngineState(
            model=names[index],
            pipeline_id=PipelineId(f"pipeline-{index}"),
            epoch=Epoch(1, EngineId("engine-1")),
            state=state,
            address=address,
            context_length=CONTEXT,
            error=error,
        )
        for index, address in enumerate(addresses)
    ]
    served = tuple(ServedModel(engine=engine, model_path="/nowhere") for engine in engines)
    return ClusterView(cluster_id="test", served=served, loadable=tuple(loadable))
