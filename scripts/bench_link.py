"""Latency of one hop between two stage processes on this machine, beside a bare gRPC stream of the same bytes.

Backends compute nothing here: what is measured is the way from ``collect`` returned on stage 0 to ``submit`` entered on
stage 1, one step in flight.

Further rows measure a decode of 20 KB over an emulated link that carries a prompt's chunks of 16 MB back to back. The
baseline sends all steps in one class, so that nothing passes. Predicted before the first run: the way is the link's
latency, the decode's own upload, and the bulk bytes that are under way, which take ``QUEUE_S`` (4 ms). That makes
4.5 ms over 1 Gbit/s, 0.3 ms, and 9.6 ms over 300 Mbit/s, 5 ms. In order, a decode waits for half a chunk to two chunks:
64 to 260 ms, and 210 to 850 ms. The chunks keep at least 0.95 of the link's rate.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
import numpy as np
import uvloop
from edgepipe_emulated import EmulatedWeights, emulated_model_config
from figures import Row, print_rows

from edgepipe.backend.drafting import DraftModel
from edgepipe.backend.types import (
    DEFAULT_SETTINGS,
    Activations,
    ActivationType,
    BlockRun,
    DeviceProfile,
    PackedProducts,
    Step,
    StepOutput,
    TokenIds,
)
from edgepipe.ids import PipelineId, SequenceId, StepId
from edgepipe.link.channels import bind, make_channel, make_server
from edgepipe.link.pacing import PIECE_S
from edgepipe.sampling import SamplingParams
from edgepipe.security.mutual_tls import Credentials, Plaintext
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.stage.stage import Stage
from edgepipe.system import SystemClock
from edgepipe.units import parse_link
from edgepipe.wire.common import Hello
from edgepipe.wire.pipelines import PipelineSpec, spec_to_wire
from edgepipe.wire.plans import PlanRow, StepPlan
from edgepipe.wire.registrations import Registration
from tests.support.engine.pipeline import Control, Driver, epoch
from tests.support.network.link_load import CHUNK_BYTES, DECODE_BYTES, Load, measure
from tests.support.network.ports import free_port

TOKENS = 16
WARM_UP_STEPS = 100
STEPS = 1000
CHUNKS_S = 3.0  # seconds of chunks on a link
TARGET_MS = 0.6
SLICES = make_slices([LayerRange(0, 1), LayerRange(1, 2)], 2)


def link_rows(*, hidden_size: int = 576, steps: int = STEPS) -> list[Row]:
    """The hop's latency and the baseline's, from one run of both."""
    with ExitStack() as stack:
        echo = stack.enter_context(_process(_serve_echo))
        ports = [stack.enter_context(_process(_serve_stage, index, hidden_size)) for index in range(2)]
        raw_ms = uvloop.run(_echo_ms(echo, TOKENS * hidden_size * 2, steps))
        hop_ms, turn_ms = uvloop.run(_hop_ms(ports, hidden_size, steps))
    size = f"{TOKENS} tokens x {hidden_size}"
    rows: list[Row] = []
    for label, share, target, met in (
        ("p50", 0.50, f"<= {TARGET_MS} ms", _quantile(hop_ms, 0.5) <= TARGET_MS),
        ("p95", 0.95, "", None),
    ):
        value, base = _quantile(hop_ms, share), _quantile(raw_ms, share) / 2
        rows.append(Row(f"link, {size}, {label}", value, "ms", base, "bare gRPC, RTT/2", value / base, target, met))
    turn, base = _quantile(turn_ms, 0.5), 3 * statistics.median(raw_ms) / 2
    rows.append(Row("  a step through two idle stages and back", turn, "ms", base, "three bare hops", turn / base))
    return rows


def passing_rows() -> list[Row]:
    """A decode's way beside chunks, and the chunks' rate, over two emulated links."""
    rows: list[Row] = []
    for link in ("1gbit,0.3ms", "300mbit,5ms"):
        shape = parse_link(link)
        chunks = max(6, round(CHUNKS_S * shape.bytes_per_s / CHUNK_BYTES))
        passing, in_order = (
            measure(
                Load(bytes_per_s=shape.bytes_per_s, num_chunks=chunks, link=link, in_order=in_order),
                address=f"127.0.0.1:{free_port('127.0.0.1')}",
            )
            for in_order in (False, True)
        )
        rate, base = passing.chunk_bytes_per_s / shape.bytes_per_s, in_order.chunk_bytes_per_s / shape.bytes_per_s
        two_pieces_ms = 1e3 * (shape.one_way_s + shape.upload_s(DECODE_BYTES) + 3 * PIECE_S)
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            value = 1e3 * _quantile(passing.decodes_s, share)
            before = 1e3 * _quantile(in_order.decodes_s, share)
            met = value <= two_pieces_ms if share == 0.5 else None
            target = f"<= {two_pieces_ms:.1f} ms" if share == 0.5 else ""
            name = f"a decode's way beside chunks, {link}, {label}"
            rows.append(Row(name, value, "ms", before, "in order", value / before, target, met))
        rows.append(
            Row("  the chunks' share of the link", rate, "", base, "in order", rate / base, ">= 0.95", rate >= 0.95)
        )
    return rows


def _quantile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share))


# -- the processes -----------------------------------------------------------------------------------------------------


@contextmanager
def _process(serve: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> Generator[int]:
    """A process of its own that runs ``serve`` until told to end; gives its port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(serve, theirs, *args))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join()


def _run(serve: Callable[..., Coroutine[Any, Any, None]], pipe: Connection, *args: Any) -> None:
    uvloop.run(serve(pipe, *args))


async def _until_told(pipe: Connection) -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
    await told.wait()
    asyncio.get_running_loop().remove_reader(pipe.fileno())


async def _serve_stage(pipe: Connection, index: int, hidden_size: int) -> None:
    stage = Stage(
        backend=_NullBackend(hidden_size),
        clock=SystemClock(),
        hello=Hello(role="stage"),
        security=Plaintext(),
        name=f"stage {index}",
    )
    config = emulated_model_config(num_layers=2, hidden_size=hidden_size)
    await stage.load(
        slices=[SLICES[index]],
        open_weights=lambda: EmulatedWeights(config),
        progress=lambda _: None,
        settings=DEFAULT_SETTINGS,
    )
    server = make_server(Plaintext())
    stage.add_to(server)
    port = bind(server, Plaintext(), host="127.0.0.1", port=0)
    await server.start()
    pipe.send(port)
    await _until_told(pipe)
    await server.stop(None)
    await stage.close()


async def _serve_echo(pipe: Connection) -> None:
    async def echo(requests: Any, context: Any) -> Any:
        async for data in requests:
            yield data

    server = make_server(Plaintext())
    handlers = {"Stream": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", handlers),))
    port = bind(server, Plaintext(), host="127.0.0.1", port=0)
    await server.start()
    pipe.send(port)
    await _until_told(pipe)
    await server.stop(None)


class _NullBackend:
    """Takes no time."""

    block_sizes: tuple[int, ...] = (16,)
    max_submitted = 1
    picks_candidates = False
    draft_model: DraftModel | None = None

    def __init__(self, hidden_size: int) -> None:
        self._activations: Activations = np.zeros((TOKENS, hidden_size), np.uint16)
        self._logits = np.zeros((TOKENS, 8), np.float32)

    def profile(self) -> DeviceProfile:
        return DeviceProfile(
            backend="null",
            device="none",
            name="none",
            compute_dtype="bfloat16",
            memory_total_bytes=0,
            memory_free_bytes=0,
            bandwidth_bytes_per_s=1.0,
            flops=1.0,
        )

    def load(self, slices: Any, weights: Any, progress: Any) -> None:
        pass

    def packed_products(self) -> tuple[PackedProducts, ...]:
        """Return nothing: it has no weights."""
        return ()

    def kv_block_bytes(self, config: Any, slices: Any, block_size: int) -> int:
        return 0

    def allocate_kv(
        self,
        *,
        num_blocks: int,
        block_size: int,
        window_blocks: Sequence[int] = (),
        state_slots: int = 0,
        host_places: Sequence[int] = (),
    ) -> None:
        pass

    def prepare(self, step: Step) -> Step:
        return step

    def submit(self, prepared: Step, inputs: TokenIds | Activations, edits: Any = None) -> Step:
        return prepared

    def collect(self, ticket: Step) -> StepOutput:
        if ticket.slice_index == 0:
            return StepOutput(activations=self._activations)
        return StepOutput(logits=self._logits)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


# -- the measurements --------------------------------------------------------------------------------------------------


async def _echo_ms(port: int, num_bytes: int, steps: int) -> list[float]:
    data, times = bytes(num_bytes), []
    async with make_channel(f"127.0.0.1:{port}", Credentials()) as channel:
        call: Any = channel.stream_stream("/echo.Echo/Stream")()
        for _ in range(WARM_UP_STEPS + steps):
            started_s = time.perf_counter()
            await call.write(data)
            await call.read()
            times.append((time.perf_counter() - started_s) * 1e3)
        await call.done_writing()
    return times[WARM_UP_STEPS:]


async def _hop_ms(ports: list[int], hidden_size: int, steps: int) -> tuple[list[float], list[float]]:
    """Per step: the hop, and the whole way from the plan to StepDone."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    controls = [_control(addresses, index, hidden_size) for index in range(2)]
    driver = Driver(controls, epoch(1), 2)
    turns, started_us = [], {}
    async with asyncio.TaskGroup() as tasks:
        for control in controls:
            tasks.create_task(control.run())
        for control in controls:
            await control.reports.opened.wait()
        sampling = SamplingParams(temperature=0.0)
        driver.register(
            *(Registration(sequence=SequenceId(row), sampling=sampling, prompt_tokens=1) for row in range(TOKENS))
        )
        for step in range(1, WARM_UP_STEPS + steps + 1):
            sent_s = time.perf_counter()
            driver.send(_plan(driver, step))
            done = await driver.last.done.get()
            turns.append((time.perf_counter() - sent_s) * 1e3)
            started_us[step] = done.timings[0].started_us
        await asyncio.sleep(0.3)  # stage 0 tells its timings every 100 ms
        for control in controls:
            control.hang_up()
    left = {timing.step: timing.started_us + timing.compute_us for timing in controls[0].reports.timings}
    hops = [
        (started_us[step] - left[StepId(step)]) / 1e3 for step in range(WARM_UP_STEPS + 1, WARM_UP_STEPS + steps + 1)
    ]
    return hops, turns[WARM_UP_STEPS:]


def _control(addresses: list[str], index: int, hidden_size: int) -> Control:
    spec = PipelineSpec(
        pipeline_id=PipelineId("bench"),
        epoch=epoch(1),
        slices=(SLICES[index],),
        num_slices=2,
        hidden_size=hidden_size,
        activation_type=ActivationType.BF16,
        num_blocks=TOKENS,
        block_size=16,
        next_address=addresses[1] if index == 0 else "",
        max_in_flight=2,
        step_deadline_ms=10_000,
    )
    return Control(addresses[index], spec_to_wire(spec, Hello(role="engine")))


def _plan(driver: Driver, step: int) -> StepPlan:
    """Sixteen sequences with one token each, always the same one: nothing grows."""
    first = step == 1
    return StepPlan(
        epoch=driver.epoch,
        step=StepId(step),
        last_slice=driver.last_slice,
        rows=tuple(PlanRow(SequenceId(row), 0, 1, 1, (BlockRun(row, 1),) if first else ()) for row in range(TOKENS)),
        token_ids=tuple(range(TOKENS)),
        registers=tuple(SequenceId(row) for row in range(TOKENS)) if first else (),
    )


def main() -> None:
    """One table for several widths."""
    rows = [row for hidden_size in (576, 4096, 8192) for row in link_rows(hidden_size=hidden_size)]
    print_rows("link", rows + passing_rows())


if __name__ == "__main__":
    main()
