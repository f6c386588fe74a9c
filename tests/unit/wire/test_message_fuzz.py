"""Messages that no member would send, for every method that one may call: only errors of ours come out, in little time
and memory. A failure prints the message."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import psutil
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from edgepipe.errors import EdgepipeError
from edgepipe.sampling.bounds import Within
from edgepipe.security.access import ALLOWED
from edgepipe.wire.bounds import MESSAGE_BOUNDS
from edgepipe.wire.bounds.rules import Checked
from tests.support.cluster.fuzz_messages import MessageFuzzer, fields_of, methods
from tests.support.cluster.message_feeders import FEW, Feeder, Folders, feeders

MAX_INPUT_S = 2.0  # processor time for one message
MAX_GROWTH_BYTES = 32 << 20
UNREAD = ("Engine/Describe", "Engine/Trace")  # their feeders take nothing
HIGHEST = {
    FieldDescriptor.TYPE_INT32: (1 << 31) - 1,
    FieldDescriptor.TYPE_UINT32: (1 << 32) - 1,
    FieldDescriptor.TYPE_INT64: (1 << 63) - 1,
    FieldDescriptor.TYPE_UINT64: (1 << 64) - 1,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """pytest keeps every line of a test, and that is not what is measured."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def test_every_method_that_a_member_may_call_is_fed(folders: Folders) -> None:
    assert set(feeders(folders)) == set(ALLOWED)
    assert set(ALLOWED) <= set(methods())


def share(method: str, *, of_each_kind: int) -> int:
    """How many of the messages that each kind of process sends are for this method."""
    kinds = [[name for name in ALLOWED if kind in ALLOWED[name]] for kind in ALLOWED[method]]
    return sum(of_each_kind // len(names) for names in kinds)


@pytest.mark.parametrize("method", ALLOWED)
@pytest.mark.parametrize(
    "of_each_kind", [500, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
async def test_messages_that_nobody_would_send(folders: Folders, method: str, of_each_kind: int) -> None:
    count = share(method, of_each_kind=of_each_kind)
    rng = random.Random(f"{method} {count}")
    sizes: list[int] = []  # after a tenth, and after every further third of the rest
    for start in range(0, count, FEW):
        feeder = feeders(folders)[method]
        fuzzer = MessageFuzzer(methods()[method].input_type, feeder.samples, rng)
        for _ in range(min(FEW, count - start)):
            await fed(feeder, fuzzer.message())
        if start + FEW >= count * (1 + 3 * len(sizes)) // 10:
            sizes.append(memory())
    if count > 10 * FEW:  # else the allocator's arenas are all that grows
        steps = [after - before for before, after in pairwise(sizes)]
        assert 3 * min(steps) <= MAX_GROWTH_BYTES, f"{steps} bytes: what leaks grows all the time"


@pytest.mark.parametrize("method", [method for method in ALLOWED if method != "Weights/ReadTensor"])
async def test_valid_messages_are_no_errors(folders: Folders, method: str) -> None:
    feeder = feeders(folders)[method]
    for sample in feeder.samples:
        await feeder.feed(sample)


def beyond_bounds(message: Message, whole: Message) -> Iterator[tuple[str, Message]]:
    """Copies of ``whole`` with one number of ``message``, a part of it, far beyond its bound."""
    rules = MESSAGE_BOUNDS.get(message.DESCRIPTOR.name, {})
    for field in fields_of(message):
        rule = rules.get(field.name)
        if isinstance(rule, Within) and not field.is_repeated:
            before = getattr(message, field.name)
            number = 2 * rule.highest + 2
            if field.type in HIGHEST and number > HIGHEST[field.type]:
                continue  # no number of the type is that large
            setattr(message, field.name, number if field.type not in HIGHEST else int(number))
            copy = type(whole)()
            copy.CopyFrom(whole)
            setattr(message, field.name, before)
            yield f"{message.DESCRIPTOR.name}.{field.name}", copy
        elif field.message_type is not None and not isinstance(rule, Checked):
            values: Any = getattr(message, field.name)
            for part in values if field.is_repeated else [values] * message.HasField(field.name):
                yield from beyond_bounds(part, whole)


@pytest.mark.parametrize("method", [method for method in ALLOWED if method not in UNREAD])
async def test_numbers_beyond_their_bounds_are_refused_where_they_enter(folders: Folders, method: str) -> None:
    for index in range(len(feeders(folders)[method].samples)):
        feeder = feeders(folders)[method]
        whole = feeder.samples[index]
        for name, message in beyond_bounds(whole, whole):
            with pytest.raises(EdgepipeError, match=name.replace(".", r"\.")):
                await feeders(folders)[method].feed(message)


async def fed(feeder: Feeder, message: Message) -> None:
    """Feed one. Raises AssertionError for any error but ours."""
    began_s = time.thread_time()
    try:
        await feeder.feed(message)
    except EdgepipeError:
        pass
    except Exception as exc:
        raise AssertionError(f"{type(exc).__name__}: {exc}\n{str(message)[:3000]}") from exc
    await asyncio.sleep(0)  # generators that were left end then
    assert time.thread_time() - began_s <= MAX_INPUT_S, str(message)[:3000]


def memory() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss
