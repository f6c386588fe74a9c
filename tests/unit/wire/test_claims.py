"""Numbers from another process near every boundary of the receiver's own state, and what finds a missing check."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from google.protobuf.descriptor import Descriptor

from edgepipe.engine.held_reports import HeldReport
from edgepipe.engine.pump import Pump
from edgepipe.engine.requests import GatewayStream
from edgepipe.errors import EdgepipeError
from edgepipe.gateway.log import RequestLog
from edgepipe.scheduler import Tier
from edgepipe.wire.tiers import HeldPlaces, keys_of
from tests.support.cluster.claims import RECEIVERS, Receiver, bounded_work
from tests.support.cluster.fuzz_messages import MessageFuzzer

Unchecked = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def tell(receiver: Receiver, *, count: int, seed: int) -> int:
    """Tell the receiver fuzzed messages. Return how many it refused. Raises AssertionError for any harm."""
    refused = 0
    kind = cast("Descriptor", receiver.samples[0].DESCRIPTOR)  # the stubs name two classes, which are one
    fuzzer = MessageFuzzer(kind, receiver.samples, random.Random(seed), near=receiver.near)
    for _ in range(count):
        message = fuzzer.message()
        try:
            with bounded_work():
                await receiver.take(message)
        except EdgepipeError:
            refused += 1
        except Exception as exc:
            raise AssertionError(f"{type(exc).__name__}: {exc}\n{str(message)[:2000]}") from exc
        await receiver.check()
    return refused


@pytest.mark.parametrize("name", RECEIVERS)
@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
async def test_claims_near_the_receivers_state_harm_nobody(name: str, count: int) -> None:
    refused = await tell(RECEIVERS[name](), count=count, seed=count)
    assert refused, "some of them go too far"


@pytest.mark.parametrize("name", RECEIVERS)
async def test_messages_within_the_receivers_state_are_taken(name: str) -> None:
    receiver = RECEIVERS[name]()
    for message in receiver.samples:
        await receiver.take(message)
        await receiver.check()


def without_the_claims_of_a_gateway(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("edgepipe.engine.table._claims_too_much", lambda *_: "")


def without_any_progress(patch: pytest.MonkeyPatch) -> None:
    """As well as the claims: the stream's loop goes round without a message, as it once did."""
    without_the_claims_of_a_gateway(patch)
    take = GatewayStream._take

    def unguarded(stream: GatewayStream) -> Any:
        try:
            return take(stream)
        except RuntimeError:
            return None

    patch.setattr(GatewayStream, "_take", unguarded)


def without_the_bounds_of_prompt_scores(patch: pytest.MonkeyPatch) -> None:
    def add(log: RequestLog, *, position: int, logprobs: Any) -> None:
        have = len(log.prompt_logprobs) + 1
        if position <= have:
            log.prompt_logprobs.extend(logprobs[have - position :])

    patch.setattr(RequestLog, "add_prompt_logprobs", add)


def without_the_bounds_of_endings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestLog, "check_ending", lambda *_, **__: None)


def without_the_bounds_of_timings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pump, "_check_timings", lambda *_: None)


def without_the_checks_of_what_is_held(patch: pytest.MonkeyPatch) -> None:
    """All pass that can be added up."""

    def note(report: HeldReport, page: HeldPlaces) -> None:
        held = report._held[Tier(page.tier)]  # pyright: ignore[reportPrivateUsage]
        held[min(page.memory_class, len(held) - 1)].update(zip(keys_of(page.keys), page.places, strict=False))

    patch.setattr(HeldReport, "note", note)


@pytest.mark.parametrize(
    ("name", "unchecked"),
    [
        ("EngineOfRogueGateway", without_the_claims_of_a_gateway),
        ("EngineOfRogueGateway", without_any_progress),
        ("GatewayOfRogueEngine", without_the_bounds_of_prompt_scores),
        ("GatewayOfRogueEngine", without_the_bounds_of_endings),
        ("EngineOfRogueStage", without_the_bounds_of_timings),
        ("EngineOpeningRogueStage", without_the_checks_of_what_is_held),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
async def test_claims_find_a_check_that_is_taken_out(
    name: str, unchecked: Unchecked, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch)
    with pytest.raises(AssertionError):
        await tell(RECEIVERS[name](), count=400, seed=400)


def go_round() -> None:
    with bounded_work(1000):
        while True:
            len("")


def test_a_loop_without_an_end_is_too_much_work() -> None:
    with pytest.raises(AssertionError, match="calls"):
        go_round()
