"""The table of requests by itself: what it tells gateways, and what it takes of the engine's memory."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest
from edgepipe_emulated import emulated_model_config
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.engine.pump import StepNews
from edgepipe.engine.requests import GatewayStream
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.table import RequestTable
from edgepipe.errors import EdgepipeError, QueueFull, RequestInvalid, StepFailed
from edgepipe.ids import NodeId, RequestId, SequenceId
from edgepipe.link.channels import MAX_MESSAGE_BYTES
from edgepipe.sampling import GrammarSpec, PromptLogprobs, SamplingParams, TokenLogprobs
from edgepipe.scheduler import (
    EndReason,
    Event,
    Scheduler,
    SchedulerLimits,
    SequenceEnded,
    SequenceSpec,
    ThrottledPolicy,
    TokenSampled,
)
from edgepipe.wire.errors import error_from_wire
from edgepipe.wire.requests import Resumption, Submission, command_to_wire, submission_from_wire
from edgepipe.wire.sizes import PACKED_BYTES
from edgepipe.wire.v1 import engine_pb2
from tests.support.cluster.claims import bounded_work

CONFIG = replace(emulated_model_config(num_layers=2, context_length=131_072), vocab_size=150_000)
GREEDY = SamplingParams(temperature=0.0)
SCORED = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=20, prompt_logprobs=True)
TOP = tuple((149_000 + rank, -float(rank)) for rank in range(20))


class Queued:
    """A queue that takes everything and computes nothing."""

    def __init__(self) -> None:
        self.specs: dict[SequenceId, SequenceSpec] = {}
        self.cancelled: list[SequenceId] = []

    def submit(self, specs: Sequence[SequenceSpec], *, accepted: bool = False) -> list[Event]:
        self.specs |= {spec.sequence: spec for spec in specs}
        return []

    def cancel(self, sequence: SequenceId, *, at_position: int) -> list[Event]:
        self.cancelled.append(sequence)
        return []


def make_table(**limits: Any) -> tuple[RequestTable, Queued]:
    table = RequestTable(config=CONFIG, limits=EngineLimits(**limits), timeouts=EngineTimeouts())
    queue = Queued()
    table.attach(queue)
    return table, queue


def request(name: str, prompt: Sequence[int], **fields: Any) -> Submission:
    return Submission(request_id=RequestId(name), prompt=tuple(prompt), **{"sampling": GREEDY, **fields})


def news(
    events: Iterable[Event] = (),
    *,
    logprobs: dict[SequenceId, TokenLogprobs] | None = None,
    prompts: Sequence[tuple[SequenceId, PromptLogprobs]] = (),
    failures: dict[SequenceId, EdgepipeError] | None = None,
) -> StepNews:
    return StepNews(
        events=list(events),
        logprobs={sequence: [each] for sequence, each in (logprobs or {}).items()},
        prompts=prompts,
        failures=failures or {},
    )


async def events_of(stream: GatewayStream) -> list[engine_pb2.EngineEvent]:
    """All that there is to tell, a message after the other."""
    stream.close()
    return [news.message async for news in stream.events()]


def errors(events: Iterable[engine_pb2.EngineEvent]) -> dict[str, EdgepipeError]:
    return {ended.request_id: error_from_wire(ended.error) for event in events for ended in event.ended}


async def test_a_gateway_that_comes_back_gets_the_log_probabilities_of_a_long_prompt() -> None:
    """Echo with log-probabilities over 25,000 tokens, 500 output tokens, and the stream breaks."""
    count = 25_000
    table, queue = make_table()
    stream = GatewayStream(NodeId("node"))
    table.submit(stream, request("a", range(count), sampling=SCORED))
    (sequence,) = queue.specs
    scores = [TokenLogprobs(-float(token), TOP) for token in range(1, count)]
    table.note_step(news(prompts=[(sequence, PromptLogprobs(position=1, tokens=tuple(scores)))]))
    for position in range(500):
        entry = TokenLogprobs(-1.0 - position, TOP)
        table.note_step(news([TokenSampled(sequence, position, 7 + position)], logprobs={sequence: entry}))
    table.detach(stream)
    again = GatewayStream(NodeId("node"))
    table.resume(again, Resumption(request_id=RequestId("a"), have=(0,)))
    events = await events_of(again)
    assert max(event.ByteSize() for event in events) <= min(PACKED_BYTES, MAX_MESSAGE_BYTES)
    parts = [part for event in events for part in event.prompt_scores]
    positions = [part.position + index for part in parts for index in range(len(part.logprobs))]
    assert positions == list(range(1, count))
    assert [token.logprob for part in parts for token in part.logprobs] == [-float(token) for token in range(1, count)]
    assert {len(token.top_ids) for part in parts for token in part.logprobs} == {20}
    tokens = [part for event in events for part in event.tokens]
    assert [token for part in tokens for token in part.ids] == list(range(7, 507))
    assert [entry.logprob for part in tokens for entry in part.logprobs] == [-1.0 - n for n in range(500)]
    table.close()


@pytest.mark.parametrize(
    "claim",
    [
        Resumption(request_id=RequestId("a"), have=(100_000,)),
        Resumption(request_id=RequestId("a"), have=(4,)),
        Resumption(request_id=RequestId("a"), have=(1, 1)),
        request("a", [1, 2], generated=((7,) * 4,)),
    ],
    ids=["far more", "one more", "another choice", "the request again"],
)
async def test_a_gateway_that_claims_tokens_it_cannot_have_loses_that_request_alone(
    claim: Resumption | Submission,
) -> None:
    table, queue = make_table()
    stream, other = GatewayStream(NodeId("rogue")), GatewayStream(NodeId("innocent"))
    table.submit(stream, request("a", [1, 2]))
    table.submit(other, request("a", [1, 2]))
    sequence, innocent = queue.specs
    table.note([TokenSampled(each, position, 7) for position in range(3) for each in (sequence, innocent)])
    again = GatewayStream(NodeId("rogue"))
    with bounded_work():
        if isinstance(claim, Resumption):
            table.resume(again, claim)
        else:
            table.submit(again, claim)
        answers = await events_of(again)
    error = errors(answers)["a"]
    assert isinstance(error, RequestInvalid)
    assert "this engine has 3" in error.fact or "the request has 1" in error.fact
    assert queue.cancelled == [sequence]
    table.note([TokenSampled(innocent, 3, 8)])
    assert [token for event in await events_of(other) for part in event.tokens for token in part.ids] == [7, 7, 7, 8]
    table.close()


async def test_a_gateway_that_has_every_token_goes_on_after_the_last() -> None:
    table, queue = make_table()
    table.submit(GatewayStream(NodeId("node")), request("a", [1, 2]))
    (sequence,) = queue.specs
    table.note([TokenSampled(sequence, position, 7) for position in range(3)])
    for claim in (Resumption(request_id=RequestId("a"), have=(3,)), request("a", [1, 2], generated=((7,) * 3,))):
        again = GatewayStream(NodeId("node"))
        if isinstance(claim, Resumption):
            table.resume(again, claim)
        else:
            table.submit(again, claim)
        assert not await events_of(again)
    table.close()


async def test_an_answer_that_is_read_at_its_end_comes_in_groups() -> None:
    table, queue = make_table()
    stream = GatewayStream(NodeId("node"))
    table.submit(stream, request("a", [1, 2], group_tokens=4))
    (sequence,) = queue.specs
    sizes: list[list[int]] = []
    for position in range(11):
        table.note([TokenSampled(sequence, position, 7)])
        sizes.append([len(part.ids) for event in await events_of(stream) for part in event.tokens])
    assert sizes == [[1], [], [], [], [4], [], [], [], [4], [], []]
    table.detach(stream)
    again = GatewayStream(NodeId("node"))
    table.resume(again, Resumption(request_id=RequestId("a"), have=(9,)))
    table.note([TokenSampled(sequence, 11, 7)])
    assert not await events_of(again), "the group is not full"
    table.note([SequenceEnded(sequence=sequence, reason=EndReason.LENGTH, num_tokens=12)])
    (event,) = await events_of(again)
    assert [(part.position, len(part.ids)) for part in event.tokens] == [(9, 3)]
    assert [ended.num_tokens for ended in event.ended] == [12]
    table.close()


async def test_what_a_stage_scores_unasked_is_not_kept() -> None:
    table, queue = make_table()
    stream = GatewayStream(NodeId("node"))
    table.submit(stream, request("a", range(100)))
    (sequence,) = queue.specs
    scores = PromptLogprobs(position=1, tokens=(TokenLogprobs(-1.0, TOP),) * 99)
    own = {sequence: TokenLogprobs(-1.0, TOP)}
    table.note_step(news([TokenSampled(sequence, 0, 7)], prompts=[(sequence, scores)], logprobs=own))
    (event,) = await events_of(stream)
    assert not event.prompt_scores
    assert [len(part.logprobs) for part in event.tokens] == [0]
    table.close()


@settings(max_examples=8, deadline=None)
@given(data=st.data())
async def test_messages_to_gateways_keep_their_bound_and_lose_nothing(data: st.DataObject) -> None:
    table, queue = make_table()
    stream = GatewayStream(NodeId("node"))
    given_ids: dict[tuple[str, int], list[int]] = {}
    for number in range(data.draw(st.integers(1, 4))):
        name = data.draw(st.sampled_from(["r", "ü" * 100])) + str(number)
        scored = data.draw(st.booleans())
        before = set(queue.specs)
        choices = data.draw(st.integers(1, 3))
        table.submit(stream, request(name, [1] * 50, num_choices=choices, sampling=SCORED if scored else GREEDY))
        for choice, sequence in enumerate(sorted(set(queue.specs) - before)):
            count = data.draw(st.sampled_from([0, 1, 6000]))
            given_ids[name, choice] = list(range(100_000, 100_000 + count))
            entry = TokenLogprobs(-1.0, TOP)
            for position, token in enumerate(given_ids[name, choice]):
                logprobs = {sequence: entry} if scored else {}
                table.note_step(news([TokenSampled(sequence, position, token)], logprobs=logprobs))
            if data.draw(st.booleans()):
                table.note_step(news(failures={sequence: StepFailed("☃" * 100_000, fact="☃" * 5000)}))
    events = await events_of(stream)
    assert all(event.ByteSize() <= PACKED_BYTES for event in events)
    got: dict[tuple[str, int], list[int]] = {key: [] for key in given_ids}
    ended: set[tuple[str, int]] = set()
    for event in events:
        for part in event.tokens:
            key = (part.request_id, part.choice)
            assert key not in ended
            assert part.position == len(got[key])
            got[key] += part.ids
        ended |= {(each.request_id, each.choice) for each in event.ended}
    assert got == given_ids
    table.close()


async def test_a_gateway_that_reads_slowly_holds_up_no_other_request_of_its_own() -> None:
    """A backlog of one request comes in parts, and the others' news go between them."""
    table, queue = make_table()
    stream = GatewayStream(NodeId("node"))
    table.submit(stream, request("long", [1] * 9, sampling=SCORED))
    table.submit(stream, request("short", [2] * 9))
    long, short = queue.specs
    for position in range(12_000):
        logprobs = {long: TokenLogprobs(-1.0, TOP)}
        table.note_step(news([TokenSampled(long, position, 9)], logprobs=logprobs))
    table.note_step(news([TokenSampled(short, 0, 9)]))
    events = await events_of(stream)
    assert any(part.request_id == "short" for event in events[:2] for part in event.tokens)
    assert len(events) > 2
    table.close()


async def test_more_prompts_than_the_memory_holds_are_a_full_queue_and_not_a_larger_engine() -> None:
    table, queue = make_table(max_new_bytes=8 << 20, max_held_bytes=16 << 20)
    stream = GatewayStream(NodeId("node"))
    prompt = range(1, 100_001)
    table.submit(stream, request("first", prompt))
    table.submit(stream, request("second", prompt))
    table.submit(stream, request("again", prompt, attempt=2, generated=((1, 2),)))
    table.submit(stream, request("small", [1]))
    assert len(queue.specs) == 2
    refused = errors(await events_of(stream))
    assert isinstance(refused["second"], QueueFull)
    assert "8 MiB" in refused["second"].fact
    assert set(refused) == {"second", "small"}, "another attempt was taken before; it fills the rest"
    table.close()


async def test_results_that_nobody_needs_go_before_a_request_is_refused() -> None:
    table, queue = make_table(max_new_bytes=8 << 20, max_held_bytes=12 << 20)
    stream = GatewayStream(NodeId("node"))
    for index in range(6):
        table.submit(stream, request(f"r{index}", range(1, 20_001), sampling=SCORED))
        (sequence,) = queue.specs
        queue.specs.clear()
        table.note_step(news(failures={sequence: StepFailed("no")}))
    assert all(isinstance(error, StepFailed) for error in errors(await events_of(stream)).values())
    table.close()


async def test_outputs_that_outgrow_the_memory_end_the_youngest_request() -> None:
    table, queue = make_table(max_new_bytes=4 << 20, max_held_bytes=6 << 20)
    stream = GatewayStream(NodeId("node"))
    table.submit(stream, request("old", [1], num_choices=2))
    table.submit(stream, request("young", [1], num_choices=2))
    for position in range(60_000):
        alive = [sequence for sequence in queue.specs if sequence not in queue.cancelled]
        table.note_step(news([TokenSampled(sequence, position, 5) for sequence in alive]))
        if queue.cancelled:
            break
    assert queue.cancelled == list(queue.specs)[2:]
    refused = errors(await events_of(stream))
    assert isinstance(refused["young"], QueueFull)
    assert "old" not in refused
    table.close()


async def test_a_gateway_that_takes_nothing_is_cut_off() -> None:
    table, _ = make_table()
    stream = GatewayStream(NodeId("node"))
    for index in range(140):
        table.submit(stream, request(f"r{index}", [CONFIG.vocab_size], num_choices=128))
    assert stream.abandoned
    assert await events_of(stream) == []
    table.close()


KINDS: dict[str, dict[str, Any]] = {
    "short prompts": {"prompt": range(1000, 1020), "count": 100, "output": 20},
    "long prompts": {"prompt": range(1000, 61_000), "count": 3, "output": 4},
    "many choices": {"prompt": range(1000, 3000), "count": 1, "output": 8, "num_choices": 128},
    "long outputs": {"prompt": range(1000, 1010), "count": 3, "output": 600},
    "log-probabilities": {"prompt": range(1000, 2000), "count": 2, "output": 200, "sampling": SCORED},
    "grammars": {
        "prompt": range(1000, 1010),
        "count": 30,
        "output": 4,
        "sampling": SamplingParams(temperature=0.0, grammar=GrammarSpec("ü" * 40_000)),
    },
    "biases": {
        "prompt": range(1000, 1010),
        "count": 60,
        "output": 4,
        "sampling": SamplingParams(temperature=0.0, logit_bias=tuple((1000 + n, n / 7) for n in range(300))),
    },
}


def taken_and_counted(kind: dict[str, Any]) -> tuple[int, int]:
    """Bytes that the table's requests take with a real scheduler while all run, and those that it counts."""
    fields = {name: value for name, value in kind.items() if name not in ("prompt", "count", "output")}
    wants = fields.get("sampling") is SCORED
    wire = [
        command_to_wire(
            request(f"r{n}", kind["prompt"], **{"max_tokens": 10 * kind["output"], **fields})
        ).SerializeToString()
        for n in range(kind["count"])
    ]
    limits = SchedulerLimits(
        num_blocks=60_000, block_size=16, context_length=131_072, micro_batches=1, max_running=1000
    )
    stream = GatewayStream(NodeId("node"))
    scheduler = Scheduler(limits, ThrottledPolicy())
    table = RequestTable(config=CONFIG, limits=EngineLimits(), timeouts=EngineTimeouts())
    table.attach(scheduler)  # pyright: ignore[reportArgumentType] - as the pump, but for a name
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for data in wire:
        table.submit(stream, submission_from_wire(engine_pb2.GatewayMessage.FromString(data).submit))
    choices = list(table._choices.values())  # pyright: ignore[reportPrivateUsage]
    if wants:
        score_prompts(table, [choice.sequence for choice in choices], len(kind["prompt"]))
    while min(len(choice.log) for choice in choices) < kind["output"] - 1:
        run_step(scheduler, table, with_logprobs=wants)
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    held = table._held_bytes  # pyright: ignore[reportPrivateUsage]
    table.close()
    return taken, held


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
async def test_requests_take_no_more_memory_than_is_counted(kind: dict[str, Any]) -> None:
    tracemalloc.start()
    try:  # caches that fill, and threads of other tests, only add to what is taken: the smaller of two counts
        taken, held = min(taken_and_counted(kind) for _ in range(2))
    finally:
        tracemalloc.stop()
    assert taken <= held, f"{taken} bytes are taken, {held} are counted"
    assert held <= 4 * taken, f"{taken} bytes are taken, {held} are counted: far too many"


async def test_a_prompt_that_is_refused_is_not_kept() -> None:
    """Its gateway takes no answers: they wait, and hold nothing of what they answer."""
    table, _ = make_table()
    stream = GatewayStream(NodeId("node"))
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(10):
            ids = [100_000 + number * place % 40_000 for place in range(20_000)]
            table.submit(stream, request(f"r{number}", [*ids, CONFIG.vocab_size]))
            del ids
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 200_000
    finally:
        tracemalloc.stop()
    assert len(errors(await events_of(stream))) == 10
    table.close()


def score_prompts(table: RequestTable, sequences: Sequence[SequenceId], length: int) -> None:
    """The log-probabilities of whole prompts."""
    for sequence in sequences:
        tokens = tuple(own_logprobs(index) for index in range(1, length))
        table.note_step(news(prompts=[(sequence, PromptLogprobs(position=1, tokens=tokens))]))


def run_step(scheduler: Scheduler, table: RequestTable, *, with_logprobs: bool) -> None:
    """A step whose tokens are integers of their own."""
    step = scheduler.next_step()
    assert step is not None
    sampled = [each for each, samples in zip(step.sequences, step.samples, strict=True) if samples]
    events = scheduler.retire(step.step, [(100_000 + (step.step + row) % 40_000,) for row in range(len(sampled))])
    table.note_step(news(events, logprobs=dict.fromkeys(sampled, own_logprobs(step.step)) if with_logprobs else {}))


def own_logprobs(number: int) -> TokenLogprobs:
    """As from a message: numbers of their own."""
    top = tuple((100_000 + number + rank, -(number + rank) / 7) for rank in range(20))
    return TokenLogprobs(-number / 7, top)


def test_an_engine_at_its_bounds_stays_under_a_gigabyte() -> None:
    limits = EngineLimits()
    assert limits.max_new_bytes < limits.max_held_bytes
    in_messages = 64 * MAX_MESSAGE_BYTES  # as many gateways and stages sending at once
    assert limits.max_held_bytes + in_messages + (200 << 20) < 1 << 30


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("prompt_tokens", [120_000, 20])
async def test_a_table_filled_to_its_bounds_stays_under_a_gigabyte(prompt_tokens: int) -> None:
    """In a process of its own: what the system counts, with prompts that grow by outputs until requests are ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(prompt_tokens), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    refused, resident_bytes = map(int, output.split())
    assert refused > 0
    assert resident_bytes < 1 << 30


async def fill(prompt_tokens: int) -> None:
    """Print how many requests were refused or ended, and the resident memory."""
    table, queue = make_table()
    stream = GatewayStream(NodeId("node"))
    long = prompt_tokens > 1000
    fields = {"num_choices": 1 if long else 128}
    for number in range(200 if long else 16):
        ids = random.Random(number).choices(range(1000, 150_000), k=prompt_tokens)
        data = command_to_wire(request(f"r{number}", ids, **fields)).SerializeToString()
        table.submit(stream, submission_from_wire(engine_pb2.GatewayMessage.FromString(data).submit))
    scheduled = {sequence: list(spec.prompt) for sequence, spec in queue.specs.items()}
    for position in range(12_000_000 // len(scheduled)):
        if queue.cancelled:
            break
        events = [TokenSampled(sequence, position, 1000 + position * 7 % 140_000) for sequence in scheduled]
        for event in events:
            scheduled[event.sequence].append(event.token_id)
        table.note_step(news(events))
    refused = len(errors(await events_of(stream)))
    print(refused, psutil.Process().memory_info().rss)  # noqa: T201
    table.close()


if __name__ == "__main__":
    asyncio.run(fill(int(sys.argv[1])))
