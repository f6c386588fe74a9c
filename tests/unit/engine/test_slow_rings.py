"""No step of a slow ring counts as hung, and steps that do hang are found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import DeviceModel, named_device
from edgepipe.backend.types import DeviceProfile
from edgepipe.errors import StepFailed
from edgepipe.planner.profiles import slice_costs
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.facts import LayerRange, Slice, make_slices
from tests.support.engine.virtual_ring import CONTEXT, LOOK_S, Killed, VirtualRing, in_virtual_time

MODEL = named_shape("llama-3.1-8b")
FAST = named_device("rtx4090")
PROMPT = 32_000


def slowed(device: DeviceModel, factor: float) -> DeviceModel:
    return replace(
        device,
        name="CPU",
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s / factor,
        flops=device.flops / factor,
        tile_steps=(),
    )


CPU = slowed(FAST, 2 * 100)
"""One hundredth of an RTX 4090. It computes in float32, which takes twice the bytes and twice the time."""


def profile(device: DeviceModel) -> DeviceProfile:
    """What its stage process measures."""
    return DeviceProfile(
        backend="torch",
        device="cpu" if device is CPU else "cuda:0",
        name=device.name,
        compute_dtype="bfloat16",
        memory_total_bytes=device.memory_bytes,
        memory_free_bytes=device.memory_bytes,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        flops=device.flops,
        block_sizes=(16,),
        contiguous_kv=True,
    )


def ring_of(*devices: DeviceModel, **more: float) -> VirtualRing:
    """The model in equal parts on ``devices``, whose profiles engine and stages know."""
    ends = [round(index * MODEL.num_layers / len(devices)) for index in range(len(devices) + 1)]
    ranges = [LayerRange(start, end) for start, end in pairwise(ends)]
    slices: list[Slice] = list(make_slices(ranges, MODEL.num_layers))
    times: list[Callable[[StepWork], float]] = [
        CostModel(MODEL, device).slice_cost(part).step_s for device, part in zip(devices, slices, strict=True)
    ]
    costs = {
        index: cost
        for device, part in zip(devices, slices, strict=True)
        for index, cost in slice_costs(profile(device), MODEL, [part]).items()
    }
    return VirtualRing(times, costs=costs, **more)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "devices",
    [(CPU,), (FAST, CPU), (CPU,) * 4],
    ids=["alone", "behind an RTX 4090", "four of them"],
)
def test_a_slow_cpu_node_serves_a_32k_prompt_without_a_false_alarm(devices: tuple[DeviceModel, ...]) -> None:
    async def history() -> VirtualRing:
        ring = ring_of(*devices, micro_batches=2 * len(devices))
        await ring.run(users(ring))
        return ring

    async def users(ring: VirtualRing) -> None:
        await ring.ask(1, prompt=PROMPT, output=5)
        chat = asyncio.create_task(ring.ask(2, prompt=30, output=60))
        await asyncio.sleep(60.0)
        await ring.ask(3, prompt=PROMPT, output=2)
        await chat

    ring = in_virtual_time(history())
    assert ring.tokens == {1: 5, 2: 60, 3: 2}
    longest_s = [stage.longest_step_s for stage in ring.stages]
    assert max(longest_s) < 30.0, "no chunk takes longer than a few decode steps"
    patience_s = 8 * ring.pump.micro_batches.longest_turn_s(context_length=CONTEXT)
    assert patience_s > sum(longest_s), "a stage waits for those before it"


def test_a_ring_of_nine_stages_is_given_a_whole_turn() -> None:
    """Times as in a ring of nine laptops: a stage takes 2.9 s, a hop 0.3 s, so a whole turn takes 29 s."""

    async def history() -> VirtualRing:
        ring = VirtualRing([lambda _work: 2.93] * 9, upload_s=0.3, micro_batches=9)
        await ring.run(users(ring))
        return ring

    async def users(ring: VirtualRing) -> None:
        await asyncio.gather(*(ring.ask(number, prompt=1, output=25) for number in range(1, 10)))
        await asyncio.sleep(60.0)
        await ring.ask(10, prompt=1, output=5)

    assert in_virtual_time(history()).tokens == dict.fromkeys(range(1, 10), 25) | {10: 5}


def test_a_step_that_gets_lost_between_fast_stages_is_found_in_five_seconds() -> None:
    async def history() -> None:
        ring = ring_of(FAST, FAST)
        await ring.run(users(ring))

    async def users(ring: VirtualRing) -> None:
        await ring.ask(1, prompt=100, output=50)
        ring.stages[1].lose_steps()
        await ring.ask(2, prompt=100, output=50)

    with pytest.raises(StepFailed, match="did not come back from stage 1") as caught:
        in_virtual_time(history())
    assert caught.value.fact == "waited 5.0 s"


def test_a_slow_device_that_hangs_is_found_in_eight_times_what_its_step_takes() -> None:
    async def history() -> tuple[float, float]:
        ring = ring_of(CPU)
        device = ring.stages[0]
        with pytest.raises((Killed, StepFailed)):
            await ring.run(users(ring))
        assert device.hung_since_s
        return asyncio.get_running_loop().time() - device.hung_since_s, device.longest_step_s

    async def users(ring: VirtualRing) -> None:
        await ring.ask(1, prompt=100, output=20)
        ring.stages[0].hang_at_next_decode()
        await ring.ask(2, prompt=100, output=50)

    waited_s, step_s = in_virtual_time(history())
    assert waited_s < 8 * step_s + 2 * LOOK_S
