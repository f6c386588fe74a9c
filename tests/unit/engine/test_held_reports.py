"""What a stage says of its memory counts as a whole, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.backend.types import ActivationType
from edgepipe.engine.held_reports import HeldReport
from edgepipe.ids import EngineId, Epoch, PipelineId
from edgepipe.scheduler import HeldTiers, Tier
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.wire.pipelines import PipelineSpec
from edgepipe.wire.sizes import MAX_HELD
from edgepipe.wire.tiers import HeldPlaces

EPOCH = Epoch(4, EngineId("e"))
SPEC = PipelineSpec(
    pipeline_id=PipelineId("p"),
    epoch=EPOCH,
    slices=(Slice(index=0, layers=LayerRange(0, 1), embedding=True, head=True),),
    num_slices=1,
    hidden_size=8,
    activation_type=ActivationType.BF16,
    num_blocks=4,
    block_size=16,
    state_slots=2,
    host_places=(9, 3),
    disk_places=(20, 6),
    asks_held=True,
    next_address="",
    max_in_flight=1,
    step_deadline_ms=1000,
)
A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


def page(*places: int, keys: bytes, memory_class: int = 0, tier: Tier = Tier.HOST, epoch: Epoch = EPOCH) -> HeldPlaces:
    return HeldPlaces(epoch=epoch, memory_class=memory_class, tier=tier, places=places, keys=keys)


def test_messages_add_up() -> None:
    report = HeldReport(SPEC)
    for each in (
        page(8, keys=A),
        page(2, 3, keys=B + C),
        page(2, keys=A, memory_class=1),
        page(19, keys=B, tier=Tier.DISK),
        page(3, 0, keys=A + B, tier=Tier.DEVICE),
        page(1, keys=B, memory_class=1, tier=Tier.DEVICE),
    ):
        report.note(each)
    assert report.problem == ""
    assert report.held() == HeldTiers(
        device=({A: 3, B: 0}, {B: 1}), host=({A: 8, B: 2, C: 3}, {A: 2}), disk=({B: 19}, {})
    )


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (page(1, keys=A, memory_class=2), "it names places of memory class 2 in host memory, 2 classes are there"),
        (page(9, keys=A), "it names place 9 of 9 in host memory"),
        (page(6, keys=A, memory_class=1, tier=Tier.DISK), "it names place 6 of 6 on disk"),
        (page(4, keys=A, tier=Tier.DEVICE), "it names place 4 of 4 on the device"),
        (page(2, keys=A, memory_class=1, tier=Tier.DEVICE), "it names place 2 of 2 on the device"),
        (page(1, 2, keys=A), "it names 2 places with 16 bytes of keys"),
        (page(1, keys=A[:-1]), "it names 1 places with 15 bytes of keys"),
        (page(keys=b""), "it names 0 places with 0 bytes of keys"),
        (page(*[1] * (MAX_HELD + 1), keys=A * (MAX_HELD + 1)), "it names 4097 places with 65552 bytes of keys"),
        (page(1, 2, keys=A + A), "it names a place or a key in host memory twice"),
        (page(1, 1, keys=A + B), "it names a place or a key in host memory twice"),
        (page(5, keys=C), "it names a place or a key in host memory twice"),
        (page(7, keys=A), "it names a place or a key in host memory twice"),
        (page(1, keys=A, epoch=Epoch(3, EngineId("e"))), "it tells an epoch that has not asked"),
    ],
)
def test_a_report_with_a_fault_is_dropped_with_its_reason(wrong: HeldPlaces, problem: str) -> None:
    report = HeldReport(SPEC)
    report.note(page(7, keys=C))
    report.note(wrong)
    report.note(page(3, keys=B))
    assert report.problem == problem
    assert not report.held()


def test_a_stage_that_was_not_asked_tells_nothing() -> None:
    report = HeldReport(replace(SPEC, asks_held=False))
    report.note(page(1, keys=A))
    assert report.problem == "it tells an epoch that has not asked"
    assert not report.held()
