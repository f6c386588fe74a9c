"""Sends a workload to the engine of a served model and records the arrival time of every token."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc.aio

from edgepipe.errors import PeerClosed
from edgepipe.ids import RequestId
from edgepipe.link.channels import make_channel, translated
from edgepipe.sampling import SamplingParams
from edgepipe.security.mutual_tls import Security
from edgepipe.simulation.report import ObservedRequest, StepRecord
from edgepipe.simulation.workload import Workload, WorkloadRequest
from edgepipe.wire.codec import from_wire
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.engines import EngineState, EngineTrace, StepTrace
from edgepipe.wire.errors import error_from_wire
from edgepipe.wire.requests import Submission, command_to_wire
from edgepipe.wire.step_clocks import SAME_CLOCK_S, clock_offsets_s
from edgepipe.wire.v1 import engine_pb2, engine_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_PEER = "the engine"
_RPC_S = 5.0
_TRACE_EVERY_S = 1.0  # the engine keeps the steps of the last minute
_LAST_TIMINGS_S = 0.25  # stages report their timings within 0.1 s

OnProgress = Callable[[int, int], None]  # (ended requests, received tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Measurements of a run; times are seconds since its start."""

    requests: tuple[ObservedRequest, ...]
    steps: tuple[StepRecord, ...]
    preemptions: int


@dataclass(slots=True, kw_only=True)
class _Underway:
    request: WorkloadRequest
    arrival_s: float
    token_times_s: list[float] = field(default_factory=list[float])
    cached_tokens: int = 0
    error: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self) -> ObservedRequest:
        return ObservedRequest(
            index=self.request.index,
            arrival_s=self.arrival_s,
            prompt_tokens=self.request.prompt_tokens,
            token_times_s=tuple(self.token_times_s),
            cached_tokens=self.cached_tokens,
            error=self.error,
        )


class BenchClient:
    """One stream to one engine, opened by ``connected``. One run at a time."""

    def __init__(self, stub: Any, call: Any) -> None:
        self._stub = stub
        self._call = call
        self._underway: dict[str, _Underway] = {}
        self._writing = asyncio.Lock()  # gRPC allows one write at a time
        self._runs = 0
        self._name = f"bench-{secrets.token_hex(4)}"  # unique: engines keep results of old requests
        self._began_s = 0.0
        self._steps: dict[int, StepTrace] = {}
        self._on_progress: OnProgress = _ignore_progress
        self._num_ended = self._num_tokens = 0

    async def run(self, workload: Workload, *, num_stages: int, on_progress: OnProgress | None = None) -> MeasuredRun:
        """Send every request at its arrival time. Return when the last request has ended. Raises LinkError."""
        self._runs += 1
        self._underway, self._steps = {}, {}
        self._on_progress = on_progress or _ignore_progress
        self._num_ended = self._num_tokens = 0
        before = await self._trace(after_step=0)
        last = before.steps[-1].step if before.steps else 0
        self._began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tracer = tasks.create_task(self._follow_steps(last, num_stages), name="bench-steps")
            await self._make_requests(workload)
            tracer.cancel()
        await asyncio.sleep(_LAST_TIMINGS_S)
        after = await self._trace(after_step=self._untimed(last, num_stages))
        self._keep(after)
        return MeasuredRun(
            requests=tuple(request.record() for request in self._underway.values()),
            steps=self._step_records(after, num_stages),
            preemptions=after.preemptions - before.preemptions,
        )

    async def _make_requests(self, workload: Workload) -> None:
        users = asyncio.Semaphore(workload.concurrency or len(workload.requests))
        prompts = [workload.prompt_ids(request) for request in workload.requests]
        self._began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for request, prompt in zip(workload.requests, prompts, strict=True):
                if request.arrival_s is not None:
                    await asyncio.sleep(max(0.0, self._began_s + request.arrival_s - time.monotonic()))
                await users.acquire()
                tasks.create_task(self._one(request, prompt, users, priority=workload.priority))

    async def _one(
        self, request: WorkloadRequest, prompt: tuple[int, ...], users: asyncio.Semaphore, *, priority: int
    ) -> None:
        request_id = RequestId(f"{self._name}-{self._runs}-{request.index}")
        underway = self._underway[request_id] = _Underway(request=request, arrival_s=time.monotonic() - self._began_s)
        submission = Submission(
            request_id=request_id,
            prompt=prompt,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            priority=priority,
            sampling=SamplingParams(temperature=0.0),
        )
        async with self._writing:
            await self._call.write(command_to_wire(submission))
        await underway.ended.wait()
        users.release()
        self._num_ended += 1
        self._on_progress(self._num_ended, self._num_tokens)

    async def read(self) -> None:
        """Read the engine's messages until cancelled, which ends the stream. Raises LinkError if the engine ends it."""
        while (event := await self._call.read()) is not grpc.aio.EOF:
            now_s = time.monotonic() - self._began_s
            for tokens in event.tokens:
                if underway := self._underway.get(tokens.request_id):
                    underway.token_times_s.extend([now_s] * len(tokens.ids))
                    self._num_tokens += len(tokens.ids)
            for ended in event.ended:
                if underway := self._underway.get(ended.request_id):
                    underway.cached_tokens = ended.cached_prompt_tokens
                    underway.error = str(error_from_wire(ended.error)) if ended.reason == "error" else ""
                    underway.ended.set()
        raise PeerClosed("the engine ended its stream during the run", next_step="see 'edgepipe logs'")

    async def _follow_steps(self, last: int, num_stages: int) -> None:
        """Fetch the finished steps before the engine forgets them."""
        while True:
            await asyncio.sleep(_TRACE_EVERY_S)
            self._keep(await self._trace(after_step=self._untimed(last, num_stages)))

    def _untimed(self, last: int, num_stages: int) -> int:
        """Return the last step that every stage has reported."""
        step = last
        while (known := self._steps.get(step + 1)) is not None and len(known.spans) == num_stages:
            step += 1
        return step

    def _keep(self, trace: EngineTrace) -> None:
        self._steps.update((step.step, step) for step in trace.steps)

    async def _trace(self, *, after_step: int) -> EngineTrace:
        reply = await self._stub.Trace(engine_pb2.TraceEngine(after_step=after_step), timeout=_RPC_S)
        return from_wire(reply, EngineTrace)

    def _step_records(self, trace: EngineTrace, num_stages: int) -> tuple[StepRecord, ...]:
        ahead_s = trace.now_us * 1e-6 - time.monotonic()  # the engine's clock over this process's
        origin_s = self._began_s + (ahead_s if abs(ahead_s) > SAME_CLOCK_S else 0.0)
        steps = [self._steps[number] for number in sorted(self._steps)]
        offsets_s = clock_offsets_s([step.spans for step in steps if len(step.spans) == num_stages])
        return tuple(
            StepRecord(
                step=step.step,
                decode_rows=step.decode_rows,
                prefill_tokens=step.prefill_tokens,
                micro_batches=step.micro_batches,
                planned_s=step.planned_us * 1e-6 - origin_s,
                stages=tuple(
                    (span.begin_us * 1e-6 - origin_s - offset_s, span.end_us * 1e-6 - origin_s - offset_s)
                    for span, offset_s in zip(step.spans, offsets_s, strict=True)
                ),
                used_blocks=step.used_blocks,
            )
            for step in steps
            if len(step.spans) == num_stages
        )


@asynccontextmanager
async def connected(engine: EngineState, hello: Hello, security: Security) -> AsyncGenerator[BenchClient]:
    """Connect a client to an engine that admits the owner of ``security``.

    Raises LinkError, and the engine's error if it refuses the client.
    """
    async with make_channel(engine.address, security.to_process(engine.certificate)) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        call: Any = stub.Generate(wait_for_ready=True)  # the engine may learn of this client a moment later
        with translated(_PEER):
            try:
                async with asyncio.timeout(_RPC_S):
                    await call.write(engine_pb2.GatewayMessage(hello=hello_to_wire(hello)))
                    await call.read()  # the engine's first message
                client = BenchClient(stub, call)
                async with asyncio.TaskGroup() as tasks:
                    reader = tasks.create_task(client.read(), name="bench-tokens")
                    yield client
                    reader.cancel()
            finally:
                call.cancel()


def _ignore_progress(num_ended: int, num_tokens: int) -> None:
    """Ignore progress."""
