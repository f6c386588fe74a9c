"""How the table of requests measures net progress, and how it tries suspected requests one by one."""

from __future__ import annotations

import asyncio

from edgepipe.engine.pump import StepNews
from edgepipe.engine.requests import GatewayStream
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.table import RequestTable
from edgepipe.errors import GrammarNotReady, StepFailed
from edgepipe.ids import NodeId, RequestId, RequestKey, SequenceId
from edgepipe.scheduler import EndReason, SequenceEnded, TokenSampled
from edgepipe.wire.requests import Cancellation
from tests.unit.engine.test_request_table import CONFIG, Queued, request

X, Y, Z = (RequestKey(NodeId("g"), RequestId(name)) for name in "xyz")


class Epochs:
    """A table with requests x, y and z of 100 tokens each, and its epochs."""

    def __init__(self) -> None:
        self.table = RequestTable(config=CONFIG, limits=EngineLimits(), timeouts=EngineTimeouts())
        self.stream = GatewayStream(NodeId("g"))
        self.begin()
        self.sequences: dict[RequestKey, SequenceId] = {}
        for key in (X, Y, Z):
            self.table.submit(self.stream, request(key.request_id, range(100)))
            (self.sequences[key],) = set(self.queue.specs) - set(self.sequences.values())

    def begin(self) -> None:
        self.table.pause()
        self.queue = Queued()
        self.table.attach(self.queue)

    def read(self, key: RequestKey, num_tokens: int) -> None:
        """A step retires after which so much of the prompt is computed."""
        sequence = self.sequences[key]
        self.table.registration(sequence, ())
        self.table.note_step(StepNews(events=[], logprobs={}, prompts=(), failures={}, reads=[(sequence, num_tokens)]))

    def sample(self, key: RequestKey, position: int) -> None:
        sequence = self.sequences[key]
        self.table.registration(sequence, ())
        event = TokenSampled(sequence, position, 7)
        self.table.note_step(StepNews(events=[event], logprobs={}, prompts=(), failures={}))

    def queued(self) -> set[RequestKey]:
        return {key for key, sequence in self.sequences.items() if sequence in self.queue.specs}


async def test_a_prompt_that_is_computed_again_up_to_where_it_was_is_no_progress() -> None:
    epochs = Epochs()
    epochs.read(X, 32)
    progress = epochs.table.progress()
    assert (progress.further, progress.stalled, progress.waiting) == (True, frozenset(), {Y, Z})
    epochs.begin()
    for num_tokens in (16, 32):
        epochs.read(X, num_tokens)
    progress = epochs.table.progress()
    assert (progress.further, progress.stalled, progress.waiting) == (False, {X}, {Y, Z})
    epochs.begin()
    epochs.read(X, 48)
    assert epochs.table.progress().further


async def test_a_request_that_waits_for_its_grammar_is_not_to_blame() -> None:
    epochs = Epochs()
    epochs.read(X, 100)
    epochs.begin()
    sequence = epochs.sequences[X]
    epochs.table.registration(sequence, ())
    waits = {sequence: GrammarNotReady("its grammar is being compiled")}
    epochs.table.note_step(StepNews(events=[], logprobs={}, prompts=(), failures=waits))
    progress = epochs.table.progress()
    assert (progress.stalled, progress.waiting) == (frozenset(), {X, Y, Z})
    epochs.table.close()


async def test_what_was_cached_is_counted_before_a_request_waits_for_its_grammar() -> None:
    """When it begins again, the cache has what it computed itself."""
    epochs = Epochs()
    sequence = epochs.sequences[X]
    for cached in (32, 96):
        waits = {sequence: GrammarNotReady("its grammar is being compiled")}
        left = {sequence: cached}
        epochs.table.note_step(StepNews(events=[], logprobs={}, prompts=(), failures=waits, cached=left))
        await asyncio.sleep(0.1)
        sequence = max(epochs.queue.specs)  # that as which it begins again
    ended = SequenceEnded(sequence, EndReason.LENGTH, 0, cached_prompt_tokens=99)
    epochs.table.note_step(StepNews(events=[ended], logprobs={}, prompts=(), failures={}))
    epochs.stream.close()
    endings = [ended async for news in epochs.stream.events() for ended in news.message.ended]
    assert [each.cached_prompt_tokens for each in endings] == [32]
    epochs.table.close()


async def test_a_new_token_is_progress_and_an_answer_computed_again_is_not() -> None:
    epochs = Epochs()
    epochs.sample(X, 0)
    assert epochs.table.progress().further
    epochs.begin()
    epochs.read(X, 100)  # what was known of it
    epochs.read(Y, 16)
    epochs.begin()
    epochs.read(X, 100)
    epochs.read(Y, 16)
    assert epochs.table.progress().stalled == {X, Y}
    epochs.sample(X, 1)
    progress = epochs.table.progress()
    assert (progress.further, progress.stalled) == (True, {Y})


async def test_suspected_requests_are_computed_one_by_one_until_they_get_further() -> None:
    epochs = Epochs()
    epochs.table.suspect({X, Y})
    epochs.begin()
    assert epochs.queued() == {X, Z}
    epochs.read(X, 16)
    assert epochs.queued() == {X, Y, Z}, "x got further, so y is next"
    epochs.begin()
    assert epochs.queued() == {Y, Z, X}, "x is not suspected any more, and y alone is"
    epochs.table.suspect({X, Y})
    epochs.begin()
    epochs.table.refuse_one(X, StepFailed("no"))
    epochs.begin()
    assert epochs.queued() == {Y, Z}


async def test_a_request_that_is_held_back_can_be_cancelled_and_one_on_trial_that_is_cancelled_ends_its_trial() -> None:
    epochs = Epochs()
    epochs.table.suspect({X, Y, Z})
    epochs.begin()
    assert epochs.queued() == {X}
    cancel = Cancellation(request_id=Y.request_id, attempt=1, choice=0, at_position=0)
    epochs.table.cancel(epochs.stream, cancel)
    assert Y not in epochs.table.progress().waiting, "it has ended"
    epochs.table.submit(epochs.stream, request(X.request_id, range(100), attempt=2))  # its gateway began it anew
    assert Z in epochs.queued()
