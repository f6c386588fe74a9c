"""Stream from this gateway to an engine. It carries all requests, and resumes them after a break."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from edgepipe.errors import ConnectTimeout, EdgepipeError, PeerClosed, RemoteProtocolError, Retry
from edgepipe.gateway.engine_types import RoutedModel
from edgepipe.gateway.generation import Generation
from edgepipe.ids import RequestId
from edgepipe.link.channels import from_rpc_error, make_channel
from edgepipe.security.mutual_tls import Security
from edgepipe.wire.common import Hello, check_hello, hello_from_wire, hello_to_wire
from edgepipe.wire.requests import (
    Cancellation,
    ChoiceEnded,
    EngineReport,
    GatewayCommand,
    Resumption,
    command_to_wire,
    reports_from_wire,
)
from edgepipe.wire.v1 import engine_pb2, engine_pb2_grpc

logger = logging.getLogger(__name__)

_TRY_AGAIN_S = 5.0  # after a failed try without requests, a request may try the engine again this much later


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Bounds of one engine link."""

    resume_window_s: float = 60.0  # a node starts a new engine within some seconds
    answer_s: float = 3.0  # deadline of the engine's first message
    again_s: float = 0.2  # pause between two attempts, unless news of the engine arrives
    # Silence of one of several pipelines after which its requests go on at another one. A blip of the network heals
    # within; a new engine would compute the prompts again in any case.
    patience_s: float = 1.0
    max_requests: int = 4096  # prompts in flight, of all keys; each may hold a whole context of ids
    max_outbox: int = 16384  # messages waiting for the stream: one submit and a few cancels per request


class EngineLink:
    """Submits, cancels and resumes requests at one engine. ``run`` owns the stream; ``take`` admits a request.

    ``on_change`` is called when the stream breaks or works again. ``on_refusal`` gets a request that the engine ended
    with an error, and returns whether the request goes on elsewhere.
    """

    def __init__(self, served: RoutedModel, *, hello: Hello, security: Security, limits: LinkLimits) -> None:
        self._served = served
        self._hello = hello
        self._security = security
        self._limits = limits
        self._active: dict[RequestId, Generation] = {}
        self._submitted_to: dict[RequestId, str] = {}  # engine id by request
        self._outbox: asyncio.Queue[engine_pb2.GatewayMessage] | None = None  # set while a stream is open
        self._engine_id = ""
        self._address = served.address
        self._greeting: asyncio.Timeout | None = None  # set until the engine greets
        self._call: Any = None  # set while a stream is open or opening
        self._wanted = asyncio.Event()
        self._news = asyncio.Event()  # the engine's address has changed
        self._broken_since_s: float | None = None  # time on the loop's clock; None while messages arrive
        self._failed_s: float | None = None  # time of the last failed try; None: the engine has answered since
        self.on_change: Callable[[], None] = lambda: None
        self.on_refusal: Callable[[Generation, EdgepipeError], bool] = lambda _generation, _error: False

    @property
    def works(self) -> bool:
        """Whether the engine is not known to be unreachable. Without requests nothing tries it: then it may work."""
        if self._failed_s is None:
            return True
        return not self._active and asyncio.get_running_loop().time() - self._failed_s > _TRY_AGAIN_S

    @property
    def num_active(self) -> int:
        """Number of requests here."""
        return len(self._active)

    @property
    def active(self) -> Sequence[Generation]:
        """The requests here."""
        return list(self._active.values())

    def take(self, generation: Generation) -> None:
        """Send a request. Its owner calls ``drop`` at its end."""
        self._active[generation.request.request_id] = generation
        self._wanted.set()
        if self._outbox is not None:
            self._start(generation)

    def drop(self, generation: Generation) -> None:
        """Forget a request that has ended."""
        self._active.pop(generation.request.request_id, None)
        self._submitted_to.pop(generation.request.request_id, None)

    def give_up(self, generation: Generation) -> None:
        """Stop a request here that goes on at another engine."""
        for choice, have in enumerate(generation.log.have()):
            if generation.ending(choice) is None:
                self.cancel(generation, choice, have)
        self.drop(generation)

    def move(self, served: RoutedModel | None) -> None:
        """Set the engine's address; None while no engine is known. An open stream stays until it breaks or a newer
        engine appears."""
        known = (self._address, self._served.certificate)
        newer = served is not None and (served.address, served.certificate) != known
        if newer:
            self._failed_s = None
        if served is not None:
            self._served, self._address = served, served.address
        if newer and self._call is not None:
            self._call.cancel()
        if newer and self._greeting is not None:  # a call that has not connected yet does not notice its cancellation
            self._greeting.reschedule(asyncio.get_running_loop().time())
        self._news.set()

    async def run(self) -> None:
        """Keep the stream open while requests need it. Ends by cancellation only."""
        while True:
            await self._wanted.wait()
            self._after_break(await self._try())
            if self._broken_since_s is not None and self._active:
                await self._news_within(self._limits.again_s)

    def fail_all(self, error: EdgepipeError) -> None:
        """End every request with ``error``."""
        self._wanted.clear()
        self._broken_since_s = None
        for generation in self._active.values():
            generation.fail(error)

    async def _try(self) -> EdgepipeError:
        """Run one stream to the engine's address. Return the error that ended it."""
        self._news.clear()
        try:
            credentials = self._security.to_process(self._served.certificate)
        except EdgepipeError as error:
            return error
        async with make_channel(self._address, credentials) as channel:
            return await self._session(engine_pb2_grpc.EngineStub(channel))

    def _after_break(self, error: EdgepipeError) -> None:
        """Let requests wait for an engine within the resume window; fail them after it."""
        now_s = asyncio.get_running_loop().time()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        if self._failed_s is None or self._active:
            self._failed_s = now_s
            self.on_change()
        if not self._active:
            self._wanted.clear()
            self._broken_since_s = None
        elif error.retry is Retry.SAFE and now_s - self._broken_since_s < self._limits.resume_window_s:
            logger.warning("stream to the engine broke: model=%s error=%s", self._served.name, error)
        else:
            self.fail_all(error)

    async def _news_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def _session(self, stub: engine_pb2_grpc.EngineAsyncStub) -> EdgepipeError:
        """Run one stream from its opening to its end. Return the error that ended it."""
        call = self._call = stub.Generate(wait_for_ready=True)
        try:
            await self._greet(call)
            outbox: asyncio.Queue[engine_pb2.GatewayMessage] = asyncio.Queue(self._limits.max_outbox)
            self._outbox = outbox
            for generation in self._active.values():
                self._start(generation)
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(call, outbox), name=f"write:{self._served.name}")
                error = await self._read(call)
                writer.cancel()
            return error
        except grpc.aio.AioRpcError as exc:
            return from_rpc_error(exc, peer=self._peer())
        except EdgepipeError as exc:
            return exc
        except asyncio.CancelledError:
            if call.cancelled() and not _is_cancelled():
                return PeerClosed(f"{self._peer()} has moved")
            raise
        finally:
            self._outbox, self._call = None, None
            call.cancel()

    async def _greet(self, call: Any) -> None:
        """Exchange Hello and Welcome. Raises ConnectTimeout, VersionMismatch, RemoteProtocolError, AioRpcError."""
        window_s = min(self._limits.answer_s, self._limits.resume_window_s)
        try:
            async with asyncio.timeout(window_s) as self._greeting:
                await call.write(engine_pb2.GatewayMessage(hello=hello_to_wire(self._hello)))
                first = await call.read()
        except TimeoutError as exc:
            raise ConnectTimeout(
                f"{self._peer()} does not answer",
                fact=f"tried {self._address} for {window_s:.0f} s",
                next_step="see 'edgepipe status', then send the request again",
            ) from exc
        finally:
            self._greeting = None
        if first is grpc.aio.EOF or not first.HasField("welcome"):
            raise RemoteProtocolError(f"{self._peer()} did not begin with Welcome")
        check_hello(hello_from_wire(first.welcome.hello))
        self._engine_id = first.welcome.epoch.engine_id
        self._works_again()

    async def _read(self, call: Any) -> EdgepipeError:
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._works_again()
                for event in reports_from_wire(message):
                    generation = self._active.get(event.request_id)
                    if generation is None:
                        continue
                    if isinstance(event, ChoiceEnded) and isinstance(event.error, PeerClosed):
                        self._submit_again(generation, event.attempt)  # the engine has forgotten the request
                    elif not self._goes_on(generation, event):
                        generation.apply(event)
        except grpc.aio.AioRpcError as exc:
            return from_rpc_error(exc, peer=self._peer())
        return PeerClosed(f"{self._peer()} closed the connection", next_step="send the request again")

    def _works_again(self) -> None:
        self._broken_since_s = None
        if self._failed_s is not None:
            self._failed_s = None
            self.on_change()

    def _goes_on(self, generation: Generation, event: EngineReport) -> bool:
        """Return whether a request that the engine ended with an error goes on elsewhere."""
        if not isinstance(event, ChoiceEnded) or event.error is None or event.attempt != generation.request.attempt:
            return False
        return generation.failure is None and self.on_refusal(generation, event.error)

    def _start(self, generation: Generation) -> None:
        """Submit the request, resume it at the same engine, or continue it at a new engine."""
        request_id = generation.request.request_id
        known_by = self._submitted_to.get(request_id)
        if generation.failure is not None:
            return
        if known_by is None:
            self._put(generation.request)
        elif known_by == self._engine_id:
            request = generation.request
            self._put(Resumption(request_id=request_id, attempt=request.attempt, have=tuple(generation.log.have())))
        else:
            self._put(generation.next_attempt())
        for choice, at_position in generation.cancelled.items():
            self.cancel(generation, choice, at_position)

    def _submit_again(self, generation: Generation, attempt: int) -> None:
        if generation.failure is None and attempt == generation.request.attempt:
            self._put(generation.next_attempt())
            for choice, at_position in generation.cancelled.items():
                self.cancel(generation, choice, at_position)

    def cancel(self, generation: Generation, choice: int, at_position: int) -> None:
        """Stop a choice at the engine; its first ``at_position`` tokens are enough."""
        request = generation.request
        self._put(
            Cancellation(request_id=request.request_id, attempt=request.attempt, choice=choice, at_position=at_position)
        )

    async def _write(self, call: Any, outbox: asyncio.Queue[engine_pb2.GatewayMessage]) -> None:
        """Write waiting messages in order. Return quietly if the stream breaks: the reader reports the error."""
        try:
            while True:
                message = await outbox.get()
                await call.write(message)
                if message.HasField("submit") and message.submit.request_id in self._active:
                    self._submitted_to[RequestId(message.submit.request_id)] = self._engine_id
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return

    def _put(self, command: GatewayCommand) -> None:
        if self._outbox is None:
            return  # no stream: the engine forgets requests that no gateway resumes
        try:
            self._outbox.put_nowait(command_to_wire(command))
        except asyncio.QueueFull:
            self.fail_all(PeerClosed(f"{self._peer()} does not accept requests", next_step="send the request again"))

    def _peer(self) -> str:
        return f"the engine of '{self._served.name}'"


def _is_cancelled() -> bool:
    """Return whether the running task is cancelled, not only the call that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
