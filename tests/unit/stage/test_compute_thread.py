"""The one thread that touches the backend."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Sequence
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.backend.cost import StepWork
from edgepipe.backend.drafting import DraftModel
from edgepipe.backend.types import StepOutput, TokenIds
from edgepipe.stage.compute import ComputeThread, StepSpan
from edgepipe.stage.step_mark import StepMark
from edgepipe.system import SystemClock

IDS = np.zeros(1, np.int32)


class Recorder:
    """A backend that writes down what is asked of it, and on which thread."""

    def __init__(self, max_submitted: int) -> None:
        self.block_sizes: tuple[int, ...] = (16,)
        self.max_submitted = max_submitted
        self.picks_candidates = False
        self.draft_model: DraftModel | None = None
        self.calls: list[str] = []
        self.threads: set[int] = set()

    def submit(self, prepared: int, inputs: TokenIds, edits: None) -> int:
        self._note(f"submit {prepared}")
        if prepared < 0:
            raise ValueError("broken")
        return prepared

    def collect(self, ticket: int) -> StepOutput:
        self._note(f"collect {ticket}")
        return StepOutput()

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())


class Item:
    """A step of which only the order matters."""

    def __init__(self, number: int, *, wanted: bool = True, num_tokens: int = 1) -> None:
        self.prepared = number
        self.num_tokens = num_tokens
        self.slice_index = 0
        self.demand = StepWork.of_rows((0,), (num_tokens,), logit_rows=1)
        self.span: StepSpan | None = None
        self.error: Exception | None = None
        self._wanted = wanted
        self.place = (7, abs(number))

    def take_inputs(self) -> TokenIds:
        return IDS

    def edits(self) -> None:
        raise AssertionError("the backend picks no candidates")

    def wanted(self) -> bool:
        return self._wanted

    def done(self, output: StepOutput, span: StepSpan) -> None:
        self.span = span

    def failed(self, error: Exception) -> None:
        self.error = error


@pytest.fixture
async def compute() -> AsyncGenerator[ComputeThread]:
    thread = ComputeThread(clock=SystemClock(), name="compute-under-test")
    yield thread
    await thread.close()
    assert "compute-under-test" not in {other.name for other in threading.enumerate()}


async def run(compute: ComputeThread, backend: Recorder, items: list[Item]) -> None:
    """Queue all items while the thread is busy, then let it go."""
    compute.use(backend)  # pyright: ignore[reportArgumentType]
    gate = threading.Event()
    blocked = asyncio.ensure_future(compute.call(gate.wait))
    await asyncio.sleep(0)
    for item in items:
        compute.put(item)
    gate.set()
    await blocked
    await compute.call(lambda: None)


async def test_with_room_for_two_the_next_is_submitted_before_the_one_ahead_is_collected(
    compute: ComputeThread,
) -> None:
    backend = Recorder(2)
    await run(compute, backend, [Item(n) for n in (1, 2, 3)])
    assert backend.calls == ["submit 1", "submit 2", "collect 1", "submit 3", "collect 2", "collect 3"]


async def test_with_room_for_one_they_take_turns(compute: ComputeThread) -> None:
    backend = Recorder(1)
    await run(compute, backend, [Item(1), Item(2)])
    assert backend.calls == ["submit 1", "collect 1", "submit 2", "collect 2"]


async def test_only_one_thread_touches_the_backend_and_it_is_not_the_loops(compute: ComputeThread) -> None:
    backend = Recorder(2)
    items = [Item(n) for n in range(20)]
    await run(compute, backend, items)
    calling = await compute.call(threading.get_ident)
    assert backend.threads == {calling}
    assert calling != threading.get_ident()
    spans = [item.span for item in items if item.span is not None]
    assert len(spans) == 20
    assert all(span.submitted_s <= span.begun_s <= span.collected_s for span in spans)
    assert all(later.begun_s >= span.collected_s for span, later in pairwise(spans)), "the device does one at a time"
    assert (compute.started, compute.finished) == (20, 20)


async def test_a_step_that_breaks_does_not_break_the_thread(compute: ComputeThread) -> None:
    items = [Item(1), Item(-1), Item(2)]
    backend = Recorder(2)
    await run(compute, backend, items)
    assert isinstance(items[1].error, ValueError)
    assert items[2].span is not None


async def test_steps_of_an_ended_epoch_never_reach_the_backend(compute: ComputeThread) -> None:
    backend = Recorder(2)
    await run(compute, backend, [Item(1, wanted=False), Item(2)])
    assert backend.calls == ["submit 2", "collect 2"]


async def test_calls_wait_until_nothing_is_outstanding(compute: ComputeThread) -> None:
    backend = Recorder(2)
    compute.use(backend)  # pyright: ignore[reportArgumentType]
    compute.put(Item(1))
    seen = await compute.call(lambda: list(backend.calls))
    assert seen == ["submit 1", "collect 1"]


async def test_a_call_raises_what_it_raised(compute: ComputeThread) -> None:
    def fail() -> None:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        await compute.call(fail)


async def test_closing_twice_is_fine(compute: ComputeThread) -> None:
    await compute.close()
    await compute.close()


class Marked(Recorder):
    """Writes down what a daemon would read if the process died there."""

    def __init__(self, max_submitted: int, mark: StepMark) -> None:
        super().__init__(max_submitted)
        self.mark = mark

    def _note(self, call: str) -> None:
        super()._note(call)
        self.calls[-1] += f" at {self.mark.read()}"


async def test_the_mark_is_at_the_step_that_is_computed_and_nowhere_between_steps() -> None:
    with tempfile.TemporaryFile() as file:
        mark, daemons_view = StepMark(file.fileno()), StepMark(file.fileno())
    thread = ComputeThread(clock=SystemClock(), mark=mark)
    backend = Marked(2, daemons_view)
    await run(thread, backend, [Item(1), Item(2), Item(-3)])
    assert backend.calls == [
        "submit 1 at (7, 1)",
        "submit 2 at (7, 2)",
        "collect 1 at (7, 1)",
        "submit -3 at (7, 3)",
        "collect 2 at (7, 2)",
    ]
    assert daemons_view.read() is None
    await thread.close()
    mark.close()
    daemons_view.close()


class Blocking(Recorder):
    """Collects a step once it may, and says when it is about to."""

    def __init__(self) -> None:
        super().__init__(2)
        self.collecting: SimpleQueue[int] = SimpleQueue()
        self.go_on: SimpleQueue[None] = SimpleQueue()

    def collect(self, ticket: int) -> StepOutput:
        self.collecting.put(ticket)
        self.go_on.get()
        return super().collect(ticket)


async def put_at_once(compute: ComputeThread, *items: Item) -> None:
    """Queue all items while the thread is busy."""
    gate = threading.Event()
    blocked = asyncio.ensure_future(compute.call(gate.wait))
    await asyncio.sleep(0)
    for item in items:
        compute.put(item)
    gate.set()
    await blocked


async def limit_while_collecting(compute: ComputeThread, backend: Blocking, number: int) -> float:
    """The limit that the stage announces while that step is the oldest; collects it then."""
    assert await asyncio.to_thread(backend.collecting.get) == number
    limit_s = compute.limit_s()
    backend.go_on.put(None)
    return limit_s


async def test_a_decode_behind_a_first_prefill_keeps_the_prefills_limit(compute: ComputeThread) -> None:
    backend = Blocking()
    compute.use(backend)  # pyright: ignore[reportArgumentType]
    compute.put(Item(1))
    limits_s = [await limit_while_collecting(compute, backend, 1)]
    await compute.call(lambda: None)
    await put_at_once(compute, Item(2, num_tokens=2048), Item(3), Item(4))
    limits_s += [await limit_while_collecting(compute, backend, number) for number in (2, 3, 4)]
    assert limits_s[0] == 60.0, "the first decode"
    assert limits_s[1] >= 60.0, "the prefill, with a decode behind it"
    assert limits_s[2:] == [5.0, 5.0]


async def test_a_step_that_the_device_refuses_leaves_the_limit_to_the_one_ahead(compute: ComputeThread) -> None:
    backend = Blocking()
    compute.use(backend)  # pyright: ignore[reportArgumentType]
    compute.put(Item(1))
    await limit_while_collecting(compute, backend, 1)
    await compute.call(lambda: None)
    refused = Item(-3, num_tokens=2048)
    await put_at_once(compute, Item(2), refused)
    assert await limit_while_collecting(compute, backend, 2) == 5.0
    await compute.call(lambda: None)
    assert isinstance(refused.error, ValueError)


@pytest.mark.parametrize(("max_submitted", "wanted"), [(2, "submit 2"), (1, "tell")])
async def test_the_loop_hears_of_a_step_after_the_next_one_is_submitted_unless_that_takes_long(
    compute: ComputeThread, max_submitted: int, wanted: str
) -> None:
    backend = Recorder(max_submitted)
    next_item = Item(2)

    class Sampled(Item):
        def done(self, output: StepOutput, span: StepSpan) -> None:
            compute.put(next_item)
            compute.later(lambda: backend.calls.append("tell"))

    await run(compute, backend, [Sampled(1)])
    await compute.call(lambda: None)
    assert backend.calls[:2] == ["submit 1", "collect 1"]
    assert backend.calls[2] == wanted
    assert sorted(backend.calls[2:]) == ["collect 2", "submit 2", "tell"]


async def test_the_loop_hears_of_a_step_before_the_thread_waits(compute: ComputeThread) -> None:
    reported = asyncio.Event()
    loop = asyncio.get_running_loop()
    compute.use(Recorder(2))  # pyright: ignore[reportArgumentType]

    class Sampled(Item):
        def done(self, output: StepOutput, span: StepSpan) -> None:
            compute.later(lambda: loop.call_soon_threadsafe(reported.set))

    compute.put(Sampled(1))
    await asyncio.wait_for(reported.wait(), 20)


async def test_the_loop_hears_of_a_step_before_a_call_that_may_take_long(compute: ComputeThread) -> None:
    backend = Recorder(2)

    class Sampled(Item):
        def done(self, output: StepOutput, span: StepSpan) -> None:
            compute.later(lambda: backend.calls.append("tell"))

    compute.use(backend)  # pyright: ignore[reportArgumentType]
    gate = threading.Event()
    blocked = asyncio.ensure_future(compute.call(gate.wait))
    await asyncio.sleep(0)
    compute.put(Sampled(1))
    called = asyncio.ensure_future(compute.call(lambda: backend.calls.append("load")))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(blocked, called)
    assert backend.calls == ["submit 1", "collect 1", "tell", "load"]


async def test_another_thread_waits_for_a_function_between_steps(compute: ComputeThread) -> None:
    assert await asyncio.to_thread(compute.wait_for, threading.get_ident) == await compute.call(threading.get_ident)

    def fail() -> None:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        await asyncio.to_thread(compute.wait_for, fail)
    await compute.close()
    with pytest.raises(RuntimeError, match="closed"):
        await asyncio.to_thread(compute.wait_for, threading.get_ident)


class Device(Recorder):
    """A backend whose steps end when the test says so, or after some time."""

    def __init__(self, took_s: Sequence[float] | None = None, *, broken: Collection[int] = ()) -> None:
        """
        took_s  times of the steps, in turns; None: ``end`` ends them
        broken  steps that fail while the device computes them
        """
        super().__init__(2)
        self._took_s = took_s
        self._broken = broken
        self._ended: dict[int, threading.Event] = defaultdict(threading.Event)
        self._waits = SimpleQueue[tuple[str, int]]()  # what began to wait, and for which step

    def end(self, number: int) -> None:
        self._ended[number].set()

    async def begun(self) -> tuple[str, int]:
        """The next call that waits."""
        return await asyncio.to_thread(self._waits.get, timeout=30)

    def wait(self, ticket: int) -> None:
        self._waits.put(("wait", ticket))
        self._until(ticket)

    def collect(self, ticket: int) -> StepOutput:
        self._waits.put(("collect", ticket))
        output = super().collect(ticket)
        self._until(ticket)
        return output

    def _until(self, ticket: int) -> None:
        if self._took_s is None:
            assert self._ended[ticket].wait(30)
        elif not self._ended[ticket].is_set():
            time.sleep(self._took_s[ticket % len(self._took_s)])
            self._ended[ticket].set()
        if ticket in self._broken:
            raise ValueError("broken")


async def _a_step_that_comes_while_the_thread_waits(compute: ComputeThread, device: Device) -> None:
    """Steps 1 and 2. Afterwards, 2 is on the device, and another thread waits for it."""
    compute.use(device)  # pyright: ignore[reportArgumentType]
    compute.put(Item(1))
    assert await device.begun() == ("collect", 1)
    compute.put(Item(2))
    device.end(1)
    assert await device.begun() == ("wait", 2)


async def test_a_step_that_comes_while_the_device_computes_is_submitted_at_once(compute: ComputeThread) -> None:
    device = Device()
    await _a_step_that_comes_while_the_thread_waits(compute, device)
    compute.put(Item(3))
    assert await device.begun() == ("collect", 2), "the device holds two steps"
    assert device.calls == ["submit 1", "collect 1", "submit 2", "submit 3", "collect 2"]
    device.end(2)
    device.end(3)
    await compute.call(lambda: None)
    assert device.calls[-1] == "collect 3"


async def test_a_step_that_ends_while_another_thread_waits_is_collected(compute: ComputeThread) -> None:
    device = Device()
    await _a_step_that_comes_while_the_thread_waits(compute, device)
    device.end(2)
    assert await device.begun() == ("collect", 2)


class Chat(Item):
    """A step after which the next one may come."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.ended = threading.Event()

    def done(self, output: StepOutput, span: StepSpan) -> None:
        self.ended.set()


async def test_a_lone_chat_s_steps_are_waited_for_on_the_thread_again(compute: ComputeThread) -> None:
    device = Device()
    await _a_step_that_comes_while_the_thread_waits(compute, device)
    device.end(2)
    assert await device.begun() == ("collect", 2)
    waits: list[str] = []
    for number in range(3, 60):
        step = Chat(number)
        compute.put(step)
        kind, _ = await device.begun()
        waits.append(kind)
        device.end(number)
        assert await asyncio.to_thread(step.ended.wait, 30)
        if kind == "wait":
            assert await device.begun() == ("collect", number)
    assert "wait" in waits
    assert set(waits[40:]) == {"collect"}


async def test_calls_that_come_during_a_step_start_no_other_thread(compute: ComputeThread) -> None:
    device = Device()
    compute.use(device)  # pyright: ignore[reportArgumentType]
    for number in range(3):
        compute.put(Item(number))
        assert await device.begun() == ("collect", number)
        called = asyncio.ensure_future(compute.call(lambda: None))
        await asyncio.sleep(0)
        device.end(number)
        await called


@pytest.mark.parametrize("last", ["close", "call"])
async def test_a_call_waits_for_a_step_that_another_thread_waits_for(compute: ComputeThread, last: str) -> None:
    device = Device()
    await _a_step_that_comes_while_the_thread_waits(compute, device)
    ended = asyncio.ensure_future(compute.close() if last == "close" else compute.call(lambda: None))
    assert await device.begun() == ("collect", 2)
    assert not ended.done()
    device.end(2)
    await ended
    assert (compute.started, compute.finished) == (2, 2)


async def test_a_step_that_fails_while_another_thread_waits_fails_alone(compute: ComputeThread) -> None:
    device = Device(broken=[2])
    await _a_step_that_comes_while_the_thread_waits(compute, device)
    items = [Item(3), Item(4)]
    for item in items:
        compute.put(item)
    for number in (2, 3, 4):
        device.end(number)
    await compute.call(lambda: None)
    assert [item.error for item in items] == [None, None]
    assert all(item.span is not None for item in items)


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([0.0, 0.0003, 0.001]), min_size=1, max_size=7),
    st.lists(st.sampled_from([0.0, 0.0, 0.0004, 0.0012]), min_size=1, max_size=60),
    st.sets(st.integers(1, 60), max_size=3),
)
def test_whenever_steps_come_they_keep_their_order(
    took_s: list[float], pauses_s: list[float], broken: set[int]
) -> None:
    async def history() -> None:
        compute = ComputeThread(clock=SystemClock())
        device = Device(took_s, broken=broken)
        compute.use(device)  # pyright: ignore[reportArgumentType]
        items = [Item(number + 1) for number in range(len(pauses_s))]
        for item, pause_s in zip(items, pauses_s, strict=True):
            compute.put(item)
            await asyncio.sleep(pause_s)
        await compute.close()
        submitted, collected = (
            [int(c.split()[1]) for c in device.calls if kind in c] for kind in ("submit", "collect")
        )
        assert submitted == collected == [item.prepared for item in items]
        places = {call: place for place, call in enumerate(device.calls)}
        assert all(places[f"submit {n}"] > places[f"collect {n - 2}"] for n in submitted[2:]), "at most two at once"
        assert {item.prepared for item in items if item.error is not None} == broken & set(submitted)
        assert len(device.threads) == 1

    asyncio.run(history())
