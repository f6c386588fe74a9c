"""An engine with real stages (emulated backend) in this process, behind nodes that only hand out what is loaded."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio
from edgepipe_emulated import EmulatedBackend, EmulatedWeights, emulated_model_config
from edgepipe_emulated.oracle import Oracle

from edgepipe.backend.types import DEFAULT_BLOCK_SIZE, BackendOptions, StageSettings
from edgepipe.engine import Engine, EngineLimits, EngineTimeouts
from edgepipe.engine.placing import Planner
from edgepipe.errors import EdgepipeError, PeerClosed
from edgepipe.ids import NodeId, PipelineId, RequestId
from edgepipe.link.channels import bind, make_channel, make_server
from edgepipe.link.shaped import make_network
from edgepipe.sampling import SamplingParams
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.security.mutual_tls import Credentials, Plaintext
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.tensors import WeightSource
from edgepipe.stage.draft_child import DraftLaunch
from edgepipe.stage.draft_process import DraftProcess
from edgepipe.stage.grammar_builds import Trial
from edgepipe.stage.stage import StageProgress
from edgepipe.system import RandomIds, SystemClock
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.emulated_folder import byte_level_tokenizer
from edgepipe.wire.codec import from_wire
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.engines import EngineState, ServeSpec, StagePlacement
from edgepipe.wire.errors import error_from_wire
from edgepipe.wire.requests import Cancellation, GatewayCommand, Resumption, Submission, command_to_wire
from edgepipe.wire.v1 import common_pb2, engine_pb2, engine_pb2_grpc, node_pb2, node_pb2_grpc
from tests.support.engine.pipeline import LocalStages, local_stages

CONFIG = emulated_model_config(num_layers=6, context_length=512)
GREEDY = SamplingParams(temperature=0.0)
QUICK = EngineTimeouts(barren_min_s=0.01, broken_min_s=0.01, broken_max_s=0.02)
"""Short pauses after stages that tests break."""


def oracle_tokens(
    prompt: Sequence[int], count: int, *, ignore_eos: bool = True, config: ModelConfig = CONFIG
) -> list[int]:
    """Return the right tokens of a sequence."""
    oracle = Oracle(config)
    oracle.append(prompt)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(oracle.next_token())
        if tokens[-1] in config.eos_token_ids and not ignore_eos:
            break
        oracle.append(tokens[-1:])
    return tokens


def submission(request_id: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> Submission:
    """A greedy request that ignores EOS unless told otherwise."""
    fields: dict[str, Any] = {"sampling": GREEDY, "ignore_eos": True, **more}
    return Submission(request_id=RequestId(request_id), prompt=tuple(prompt), max_tokens=max_tokens, **fields)


class FakeNode(node_pb2_grpc.NodeServicer):
    """Answers Prepare with a stage that is loaded already."""

    def __init__(self, stage_address: str, *, max_blocks: int, profile: common_pb2.DeviceProfile | None = None) -> None:
        """``profile``: with rates, the engine expects step times, and so paces prompts, from the first step on."""
        self.stage_address = stage_address
        self.max_blocks = max_blocks
        self.kv_block_bytes = 128
        self.max_host_blocks = self.max_disk_blocks = 0
        self.progress: Callable[[], StageProgress] = partial(
            StageProgress, received=0, started=0, finished=0, sent=0
        )  # of the stage
        self.profile = profile or common_pb2.DeviceProfile()
        self.prepared: list[node_pb2.PrepareRequest] = []
        self.released: list[node_pb2.ReleaseRequest] = []
        self.refusal: EdgepipeError | None = None
        self.hold: asyncio.Event | None = None  # loading takes until it is set
        self.load: Callable[[tuple[Slice, ...]], Awaitable[None]] | None = None  # other layers, where asked for
        self.crashed_in: tuple[int, int] | None = None  # told once: epoch's counter and step

    async def Prepare(self, request: node_pb2.PrepareRequest, context: Any) -> AsyncGenerator[node_pb2.PrepareEvent]:
        self.prepared.append(request)
        yield node_pb2.PrepareEvent(
            progress=node_pb2.PrepareProgress(phase="loading", bytes_done=500, bytes_total=1000)
        )
        if self.hold is not None:
            await self.hold.wait()
        if self.refusal is not None:
            raise self.refusal
        if self.load is not None:
            await self.load(tuple(from_wire(part, Slice) for part in request.placement.slices))
        (epoch, step), self.crashed_in = self.crashed_in or (0, 0), None
        progress = self.progress()
        yield node_pb2.PrepareEvent(
            prepared=node_pb2.Prepared(
                crashed_epoch=epoch,
                crashed_step=step,
                address=self.stage_address,
                profile=self.profile,
                max_blocks=self.max_blocks,
                max_host_blocks=self.max_host_blocks,
                max_disk_blocks=self.max_disk_blocks,
                held_blocks=progress.kv_blocks,
                held_host_blocks=progress.host_blocks,
                held_disk_blocks=progress.disk_blocks,
                kv_block_bytes=self.kv_block_bytes,
                weight_bytes=1000,
                settings=request.settings,
            )
        )

    async def Release(self, request: node_pb2.ReleaseRequest, context: Any) -> node_pb2.ReleaseReply:
        self.released.append(request)
        return node_pb2.ReleaseReply()


@dataclass
class Answer:
    """What a gateway was told of one choice."""

    ids: list[int] = field(default_factory=list)
    ended: engine_pb2.Ended | None = None
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    reads: list[int] = field(default_factory=list[int])  # how far the prompt was, as told

    @property
    def error(self) -> EdgepipeError | None:
        """The error that ended it."""
        return error_from_wire(self.ended.error) if self.ended and self.ended.HasField("error") else None


class FakeGateway:
    """One stream to an engine, and all that came over it."""

    def __init__(self, address: str, *, node_id: str = "gateway-node", cluster_id: str = "lab") -> None:
        self.node_id = node_id
        self._channel = make_channel(address, Credentials())
        self.hello = Hello(role="gateway", node_id=node_id, cluster_id=cluster_id)
        self._commands: asyncio.Queue[engine_pb2.GatewayMessage | None] = asyncio.Queue()
        self._call: Any = None
        self._changed = asyncio.Condition()
        self.answers: dict[tuple[str, int, int], Answer] = {}  # request, attempt, choice
        self.welcome: engine_pb2.Welcome | None = None
        self.num_messages = 0
        self.patience_s = 30.0  # for an answer

    def send(self, *commands: GatewayCommand) -> None:
        """Tell the engine."""
        for command in commands:
            self._commands.put_nowait(command_to_wire(command))

    def cancel(self, request_id: str, *, at_position: int = 0, choice: int = 0, attempt: int = 1) -> None:
        """Stop wanting a choice."""
        self.send(
            Cancellation(request_id=RequestId(request_id), attempt=attempt, choice=choice, at_position=at_position)
        )

    def resume(self, request_id: str, have: Sequence[int], *, attempt: int = 1) -> None:
        """After a break."""
        self.send(Resumption(request_id=RequestId(request_id), attempt=attempt, have=tuple(have)))

    def answer(self, request_id: str, *, choice: int = 0, attempt: int = 1) -> Answer:
        """What came of a choice so far."""
        return self.answers.setdefault((request_id, attempt, choice), Answer())

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until what came makes it true."""
        async with asyncio.timeout(self.patience_s), self._changed:
            await self._changed.wait_for(predicate)

    async def ended(self, request_id: str, *, choice: int = 0, attempt: int = 1) -> Answer:
        """The whole of a choice."""
        answer = self.answer(request_id, choice=choice, attempt=attempt)
        await self.until(lambda: answer.ended is not None)
        return answer

    async def has(self, request_id: str, count: int, *, choice: int = 0) -> Answer:
        """So many tokens of a choice."""
        answer = self.answer(request_id, choice=choice)
        await self.until(lambda: len(answer.ids) >= count or answer.ended is not None)
        return answer

    def forget(self, request_id: str) -> None:
        """Drop what came of a request."""
        self.answers = {key: answer for key, answer in self.answers.items() if key[0] != request_id}

    async def run(self) -> None:
        """Carry messages until the engine or ``hang_up`` ends the stream."""
        self._call = engine_pb2_grpc.EngineStub(self._channel).Generate(self._outgoing())
        try:
            async for event in self._call:
                await self._take(event)
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise

    def hang_up(self) -> None:
        """Break the stream."""
        self._call.cancel()

    async def close(self) -> None:
        """End the stream and its channel."""
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    async def _outgoing(self) -> AsyncIterator[engine_pb2.GatewayMessage]:
        yield engine_pb2.GatewayMessage(hello=hello_to_wire(self.hello))
        while (message := await self._commands.get()) is not None:
            yield message

    async def _take(self, event: engine_pb2.EngineEvent) -> None:
        self.num_messages += 1
        async with self._changed:
            if event.HasField("welcome"):
                self.welcome = event.welcome
            for tokens in event.tokens:
                answer = self.answer(tokens.request_id, choice=tokens.choice, attempt=tokens.attempt)
                assert answer.ended is None, "a token follows the ending"
                answer.ids[tokens.position :] = tokens.ids
                assert len(answer.ids) == tokens.position + len(tokens.ids), "a token was left out"
                answer.logprobs[tokens.position :] = tokens.logprobs
            for read in event.prompt_reads:
                answer = self.answer(read.request_id, choice=read.choice, attempt=read.attempt)
                assert not answer.ids, "the prompt is read before the answer begins"
                answer.reads.append(read.num_tokens)
            for part in event.prompt_scores:
                answer = self.answer(part.request_id, choice=part.choice, attempt=part.attempt)
                answer.prompt_logprobs[part.position - 1 :] = part.logprobs
            for ended in event.ended:
                answer = self.answer(ended.request_id, choice=ended.choice, attempt=ended.attempt)
                assert answer.ended is None, "a choice ended twice"
                answer.ended = ended
            self._changed.notify_all()


class EngineLab:
    """A running engine with its nodes and stages."""

    engine: Engine
    task: asyncio.Task[None]  # the task that starts and runs it
    start_engine: Callable[..., Awaitable[None]]  # another one over the same stages; takes changes of the spec

    def __init__(self, nodes: list[FakeNode], stages: LocalStages, address: str) -> None:
        self.nodes = nodes
        self.stages = stages
        self.address = address
        self.states: list[EngineState] = []
        self.failure: EdgepipeError | None = None
        self.over = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._gateways: list[FakeGateway] = []
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Start and run the engine; its error ends up in ``failure``."""
        try:
            await self.engine.start()
            await self.engine.run()
        except EdgepipeError as error:
            self.failure = error
        finally:
            self.over.set()
            self._news.set()

    async def replace_engine(self, **changes: Any) -> None:
        """Kill the engine, and start another one over the same stages. Its gateways' streams break before.

        ``changes``: of the spec.
        """
        await self.closed()
        self._gateways.clear()
        self.task.cancel()
        await asyncio.wait((self.task,))
        self.over.clear()
        await self.start_engine(**changes)
        await self.until(lambda: self.engine.state().state == "ready")

    async def gateway(self, **more: str) -> FakeGateway:
        """A gateway with an open stream."""
        return await self.join(FakeGateway(self.address, **more))

    async def join(self, gateway: FakeGateway) -> FakeGateway:
        """Open the gateway's stream."""
        assert self._tasks is not None
        self._tasks.create_task(gateway.run(), name="fake-gateway")
        self._gateways.append(gateway)
        await gateway.until(lambda: gateway.welcome is not None)
        return gateway

    @property
    def draft_model(self) -> DraftProcess:
        """The draft model's process, beside the last stage."""
        found = self.stages.stages[-1]._draft_model  # pyright: ignore[reportPrivateUsage]
        assert found is not None
        return found

    def assert_idle(self) -> None:
        """All KV blocks free, nothing in flight, nothing queued."""
        state = self.engine.state()
        assert (state.in_flight, state.running, state.waiting) == (0, 0, 0)
        assert state.free_blocks == state.num_blocks

    async def settle(self) -> None:
        """Until the steps of cancelled sequences have retired."""
        await self.until(lambda: not self.engine.state().in_flight)

    def note_state(self, state: EngineState) -> None:
        """The engine's ``on_state``."""
        self.states.append(state)
        self._news.set()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until it is true; looked at whenever the engine tells of itself, or is over."""
        async with asyncio.timeout(30):
            while not predicate() and not self.over.is_set():
                self._news.clear()
                await self._news.wait()

    async def closed(self) -> None:
        """End the streams of all gateways."""
        for gateway in self._gateways:
            await gateway.close()

    def bind(self, tasks: asyncio.TaskGroup) -> None:
        """Where its tasks live."""
        self._tasks = tasks


def break_stage(lab: EngineLab, index: int) -> None:
    """End the epoch there."""
    session = lab.stages.stages[index]._current  # pyright: ignore[reportPrivateUsage]
    assert session is not None
    session.fault(PeerClosed("the stage is shutting down"))


def lose_kv(lab: EngineLab, *stages: int) -> None:
    """As when other processes take the stages' places: their KV is new and empty."""
    for index in stages:
        lab.stages.stages[index]._kv = ()  # pyright: ignore[reportPrivateUsage]


@asynccontextmanager
async def engine_lab(
    *,
    num_stages: int = 2,
    max_blocks: int = 256,
    max_host_blocks: int = 0,
    max_disk_blocks: int = 0,
    contiguous_kv: bool = False,
    micro_batches: int = 0,
    limits: EngineLimits | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    timeouts: EngineTimeouts | None = None,
    config: ModelConfig = CONFIG,
    device: str = "rtx4090",
    time_factor: str = "0",
    bandwidth_bytes_per_s: float = 0.0,
    flops: float = 0.0,
    kv_block_bytes: int = 128,
    ready: bool = True,
    link: str = "",
    make_backend: Callable[[int], Any] | None = None,
    weights: WeightSource | None = None,
    planner: Planner | None = None,
    constraints: Mapping[str, Any] | None = None,
    grammar_trial: Trial | None = None,
    acceptance: str = "",
    draft_folder: Path | None = None,
    kv: str = "",
) -> AsyncGenerator[EngineLab]:
    """An engine over ``num_stages`` emulated stages; everything is stopped at the end, and must be idle if it lives.

    ``bandwidth_bytes_per_s`` and ``flops``: of every device; 0: not known. ``kv_block_bytes``: as the nodes report.
    ``link`` emulates a network between them, such as ``1gbit,5ms``; ``constraints`` are further fields of the spec;
    ``acceptance`` is the share of right drafts of an emulated draft model (empty: there is none).
    ``draft_folder`` has an emulated model that drafts in a process of its own. ``kv``: form of the KV.
    ``weights``: of the backends that ``make_backend`` makes; by default an emulated model's.
    """
    share = config.num_layers // num_stages
    bounds = [share * i for i in range(num_stages)] + [config.num_layers]
    slices = make_slices([LayerRange(a, b) for a, b in itertools.pairwise(bounds)], config.num_layers)
    drafts = {"draft_acceptance": acceptance} if acceptance else {}
    options = BackendOptions(device=device, kv=kv, settings={"time_factor": time_factor, **drafts})
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        network = make_network(link, SystemClock())
        if network is not None:
            stack.callback(network.close)
        stages = await stack.enter_async_context(
            local_stages(
                make_backend=make_backend or (lambda _: EmulatedBackend(options)),
                slices=slices,
                weights=weights or EmulatedWeights(config),
                clock=SystemClock(),
                network=network,
                open_tokenizer=lambda: Tokenizer(byte_level_tokenizer(config.vocab_size)),
                grammar_trial=grammar_trial,
                draft=partial(_draft_launch, draft_folder) if draft_folder is not None else None,
                disk_folder=Path(stack.enter_context(TemporaryDirectory())) if max_disk_blocks else None,
                kv=kv,
            )
        )
        nodes = [
            FakeNode(  # pyright: ignore[reportAbstractUsage] - the rest is unused
                address,
                max_blocks=max_blocks + index,
                profile=common_pb2.DeviceProfile(
                    contiguous_kv=contiguous_kv, bandwidth_bytes_per_s=bandwidth_bytes_per_s, flops=flops
                ),
            )
            for index, address in enumerate(stages.addresses)
        ]
        for node, stage in zip(nodes, stages.stages, strict=True):
            node.max_host_blocks, node.max_disk_blocks = max_host_blocks, max_disk_blocks
            node.kv_block_bytes = kv_block_bytes
            node.progress = stage.progress
        addresses = {NodeId(f"node{i}"): await _serve_node(node, stack) for i, node in enumerate(nodes)}
        spec = ServeSpec(
            model="emulated",
            stages=tuple(StagePlacement(node_id=NodeId(f"node{i}"), slices=(part,)) for i, part in enumerate(slices)),
            micro_batches=micro_batches,
            settings=StageSettings(
                block_size=block_size, kv=kv, draft_model=draft_folder.name if draft_folder is not None else ""
            ),
            **{"draft": draft_folder.name if draft_folder is not None else "", **(constraints or {})},
        )
        lab = EngineLab(nodes, stages, "")

        async def start_engine(**changes: Any) -> None:
            server = make_server(Plaintext())
            lab.address = f"127.0.0.1:{bind(server, Plaintext(), host='127.0.0.1', port=0)}"
            counter = lab.engine.state().epoch.counter + 1 if hasattr(lab, "engine") else 1
            lab.engine = Engine(
                config=config,
                spec=replace(spec, **changes),
                nodes=addresses,
                pipeline_id=PipelineId("pipeline"),
                hello=Hello(role="engine", node_id="node0", cluster_id="lab"),
                security=Plaintext(),
                clock=SystemClock(),
                ids=RandomIds(),
                on_state=lab.note_state,
                network=network,
                planner=planner,
                address=lab.address,
                epoch_counter=counter,
                limits=limits,
                timeouts=replace(timeouts or QUICK, report_interval_s=0.02),
            )
            lab.engine.add_to(server)
            await server.start()
            stack.push_async_callback(server.stop, None)
            lab.task = tasks.create_task(lab.run(), name="engine")

        lab.start_engine = start_engine
        async with asyncio.TaskGroup() as tasks:
            lab.bind(tasks)
            await start_engine()
            if ready:
                await lab.until(lambda: lab.engine.state().state == "ready")
            yield lab
            if not lab.over.is_set():
                await lab.settle()
                lab.assert_idle()
            await lab.engine.stop()
            await lab.closed()
        assert all(node.released for node in nodes if node.prepared), "a node was not given its memory back"
    left = {task for task in asyncio.all_tasks() - before if not _of_grpc(task)}
    if left:  # stages' handlers end a moment after their servers
        _, left = await asyncio.wait(left, timeout=10)
    assert not left, f"tasks are left: {left}"


def _draft_launch(folder: Path, model: ModelBounds) -> DraftLaunch:
    return DraftLaunch(path=str(folder), backend="emulated", settings={"time_factor": "0"}, vocab_size=model.vocab_size)


def _of_grpc(task: asyncio.Task[Any]) -> bool:
    """Library tasks end on their own a moment after their call."""
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and "grpc" in code.co_filename


async def _serve_node(node: FakeNode, stack: AsyncExitStack) -> str:
    server: grpc.aio.Server = make_server(Plaintext())
    node_pb2_grpc.add_NodeServicer_to_server(node, server)  # pyright: ignore[reportArgumentType]
    port = bind(server, Plaintext(), host="127.0.0.1", port=0)
    await server.start()
    stack.push_async_callback(server.stop, None)
    return f"127.0.0.1:{port}"
