"""What gateways may do: cancel, break off, come back, try again, and ask for what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from edgepipe.engine import EngineLimits, EngineTimeouts
from edgepipe.errors import (
    EdgepipeError,
    PairingRejected,
    PeerClosed,
    PromptTooLong,
    QueueFull,
    RemoteProtocolError,
    RequestInvalid,
    VersionMismatch,
)
from edgepipe.link.channels import make_channel, translated
from edgepipe.sampling import SamplingParams
from edgepipe.security.mutual_tls import Credentials
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.v1 import common_pb2, engine_pb2, engine_pb2_grpc
from tests.support.engine.lab import CONFIG, GREEDY, FakeGateway, engine_lab, oracle_tokens, submission
from tests.support.processes.waiting import until

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SLOW: dict[str, Any] = {"device": "m4", "time_factor": "20"}  # about 10 ms a step: time to do something meanwhile


async def test_cancel_ends_a_choice_and_frees_its_blocks() -> None:
    async with engine_lab(**SLOW) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 400), submission("b", PROMPT, 12))
        await gateway.has("a", 3)
        gateway.cancel("a")
        answer = await gateway.ended("a")
        assert answer.ended is not None
        assert answer.ended.reason == "cancelled"
        assert answer.ids == oracle_tokens(PROMPT, len(answer.ids))
        assert (await gateway.ended("b")).ids == oracle_tokens(PROMPT, 12)


async def test_a_prompt_of_several_steps_tells_how_far_it_is() -> None:
    long = PROMPT * 60
    async with engine_lab(**SLOW) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", long, 3), submission("b", PROMPT[:1], 3))
        answer = await gateway.ended("a")
        short = await gateway.ended("b")
    assert answer.reads
    assert answer.reads == sorted(set(answer.reads))
    assert answer.reads[-1] < len(long)
    assert short.reads == []


async def test_cancel_at_a_position_to_come_lets_it_run_until_there() -> None:
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 400))
        gateway.cancel("a", at_position=30)
        answer = await gateway.ended("a")
        assert answer.ids[:30] == oracle_tokens(PROMPT, 30)
        assert len(answer.ids) == 30


async def test_a_resumed_stream_goes_on_where_the_gateway_is() -> None:
    async with engine_lab(**SLOW) as lab:
        first = await lab.gateway()
        first.send(submission("a", PROMPT, 40), submission("b", PROMPT[:4], 5))
        await first.has("a", 10)
        first.hang_up()
        second = await lab.gateway()
        second.answer("a").ids = oracle_tokens(PROMPT, 4)
        second.resume("a", [4])
        second.resume("b", [0])
        assert (await second.ended("a")).ids == oracle_tokens(PROMPT, 40)
        assert (await second.ended("b")).ids == oracle_tokens(PROMPT[:4], 5)


async def test_a_finished_result_can_be_had_again() -> None:
    async with engine_lab() as lab:
        first = await lab.gateway()
        first.send(submission("a", PROMPT, 9))
        await first.ended("a")
        first.hang_up()
        second = await lab.gateway()
        second.resume("a", [0])
        assert (await second.ended("a")).ids == oracle_tokens(PROMPT, 9)


async def test_a_stream_that_nobody_resumes_cancels_its_requests() -> None:
    async with engine_lab(timeouts=EngineTimeouts(resume_s=0.1), **SLOW) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 480))
        await gateway.has("a", 2)
        gateway.hang_up()
        await lab.until(lambda: lab.engine.state().running == 0)
        late = await lab.gateway()
        late.resume("a", [2])
        answer = await late.ended("a")
        assert isinstance(answer.error, PeerClosed)
        assert not answer.ids


async def test_a_request_that_arrives_after_its_resumption_leaves_the_next_attempt_alone() -> None:
    """A new stream may overtake the broken one: the gateway sends the request again, and the late one is dropped."""
    async with engine_lab(**SLOW) as lab:
        old, new = await lab.gateway(), await lab.gateway()
        new.resume("a", [0])
        assert isinstance((await new.ended("a")).error, PeerClosed)
        new.send(submission("a", PROMPT, 20, attempt=2))
        old.send(submission("a", PROMPT, 20))
        assert (await new.ended("a", attempt=2)).ids == oracle_tokens(PROMPT, 20)
        assert not old.answers


async def test_finished_results_are_forgotten_in_time_and_beyond_a_number() -> None:
    limits, timeouts = EngineLimits(max_finished=3), EngineTimeouts(resume_s=0.15)
    async with engine_lab(limits=limits, timeouts=timeouts) as lab:
        gateway = await lab.gateway()
        gateway.send(*(submission(f"r{index}", PROMPT, 2) for index in range(6)))
        for index in range(6):
            await gateway.ended(f"r{index}")
        table = lab.engine._table
        assert table is not None
        assert len(table._requests) <= 3
        await until(lambda: not table._requests)
        assert table._forget_timer is None


async def test_a_higher_attempt_cancels_the_lower_one() -> None:
    async with engine_lab(**SLOW) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 450))
        await gateway.has("a", 3)
        gateway.send(submission("a", PROMPT, 20, attempt=2, generated=(tuple(oracle_tokens(PROMPT, 3)),)))
        answer = gateway.answer("a", attempt=2)
        answer.ids = oracle_tokens(PROMPT, 3)
        await gateway.ended("a", attempt=2)
        assert answer.ids == oracle_tokens(PROMPT, 20)
        gateway.send(submission("a", PROMPT, 20, attempt=1))
        gateway.send(submission("z", PROMPT, 1))
        await gateway.ended("z")
        assert gateway.answer("a").ended is None, "the lower attempt is silent"


async def test_the_same_attempt_again_is_the_same_request() -> None:
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 12), submission("a", PROMPT, 12))
        assert (await gateway.ended("a")).ids == oracle_tokens(PROMPT, 12)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (submission("a", [1] * 600, 5), PromptTooLong, "the prompt has 600"),
        (submission("a", [], 5), RequestInvalid, "empty"),
        (submission("a", [1, 999_999], 5), RequestInvalid, "999999"),
        (submission("a", [1], 5, generated=((70_000,),)), RequestInvalid, "70000"),
        (submission("a", [1], 5, generated=((1,), (2,))), RequestInvalid, "more choices"),
        (submission("a", [1], 5, num_choices=500), RequestInvalid, "at most 128"),
    ],
    ids=["too long", "empty", "vocabulary", "generated", "continued choices", "choices"],
)
async def test_what_cannot_be_is_refused_and_the_stream_goes_on(request_, error, words) -> None:  # type: ignore[no-untyped-def]
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(request_)
        answer = await gateway.ended("a")
        assert type(answer.error) is error
        assert words in str(answer.error)
        assert answer.error is not None
        assert answer.error.request_id == "a"
        gateway.send(submission("b", PROMPT, 3))
        assert (await gateway.ended("b")).ids == oracle_tokens(PROMPT, 3)


async def test_sampling_that_cannot_be_is_refused() -> None:
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        submit = engine_pb2.Submit(
            request_id="a",
            attempt=1,
            prompt=[1],
            num_choices=2,
            max_tokens=3,
            sampling=common_pb2.SamplingParams(temperature=-1),
        )
        gateway._commands.put_nowait(engine_pb2.GatewayMessage(submit=submit))
        for choice in range(2):
            assert isinstance((await gateway.ended("a", choice=choice)).error, RequestInvalid)


async def test_a_full_queue_is_said() -> None:
    async with engine_lab(limits=EngineLimits(max_waiting=2, max_running=1), **SLOW) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 480))
        await gateway.has("a", 1)
        gateway.send(submission("b", PROMPT, 4, num_choices=2), submission("c", PROMPT, 4))
        assert isinstance((await gateway.ended("c")).error, QueueFull)
        gateway.cancel("a")
        assert (await gateway.ended("b", choice=1)).ids == oracle_tokens(PROMPT, 4)


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        (Hello(role="gateway", protocol_version=99, node_name="old"), VersionMismatch),
        (Hello(role="gateway", cluster_id="elsewhere"), PairingRejected),
        (None, RemoteProtocolError),
    ],
    ids=["version", "cluster", "no hello"],
)
async def test_strangers_are_turned_away(hello: Hello | None, error: type[EdgepipeError]) -> None:
    first = engine_pb2.GatewayMessage(cancel=engine_pb2.Cancel())
    if hello is not None:
        first = engine_pb2.GatewayMessage(hello=hello_to_wire(hello))
    async with engine_lab() as lab, make_channel(lab.address, Credentials()) as channel:
        call = engine_pb2_grpc.EngineStub(channel).Generate(iter([first]))
        with pytest.raises(error), translated("the engine"):
            await anext(aiter(call))


async def test_describe_tells_the_state() -> None:
    async with engine_lab(num_stages=3) as lab, make_channel(lab.address, Credentials()) as channel:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 30))
        await gateway.ended("a")
        state = await engine_pb2_grpc.EngineStub(channel).Describe(engine_pb2.DescribeEngine(), timeout=5)
        assert (state.state, state.model) == ("ready", "emulated")
        assert 1 <= state.micro_batches <= 3, "one per stage at first, then as many as there are sequences"
        assert state.why
        assert (state.num_blocks, state.block_size, state.context_length) == (256, 16, CONFIG.context_length)
        assert [stage.node_id for stage in state.stages] == ["node0", "node1", "node2"]
        assert state.tokens_per_s > 0
        assert state.stages[2].step_ms > 0


async def test_a_slow_gateway_gets_fewer_larger_messages() -> None:
    async with engine_lab() as lab:
        gateway = FakeGateway(lab.address)
        submit = engine_pb2.GatewayMessage(hello=hello_to_wire(gateway.hello))
        channel = gateway._channel
        call = engine_pb2_grpc.EngineStub(channel).Generate()
        await call.write(submit)
        await call.write(_as_message())
        await lab.until(lambda: lab.engine.state().running > 0)
        await lab.until(lambda: lab.engine.state().running == 0)
        events = [event async for event in _until_ended(call)]
        ids = [token for event in events for tokens in event.tokens for token in tokens.ids]
        assert ids == oracle_tokens(PROMPT, 300)
        call.cancel()
        await gateway.close()


def _as_message() -> engine_pb2.GatewayMessage:
    submit = engine_pb2.Submit(request_id="a", attempt=1, prompt=PROMPT, num_choices=1, max_tokens=300, ignore_eos=True)
    assert GREEDY.temperature == 0
    return engine_pb2.GatewayMessage(submit=submit)


async def _until_ended(call):  # type: ignore[no-untyped-def]
    async for event in call:
        yield event
        if event.ended:
            return


async def test_a_stop_id_that_the_model_does_not_have_harms_nobody() -> None:
    """From a gateway that does not check: the last stage would look for that id among the logits."""
    strange = SamplingParams(temperature=0.0, min_tokens=1)
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(
            submission("good", PROMPT, 12),
            submission("strange", PROMPT, 5, sampling=strange, stop_token_ids=frozenset({2_000_000_000})),
        )
        assert (await gateway.ended("good")).ids == oracle_tokens(PROMPT, 12)
        error = (await gateway.ended("strange")).error
        assert isinstance(error, RequestInvalid)
        assert "stop_token_ids" in error.what
        assert lab.engine.state().recoveries == 0


async def test_a_gateway_that_claims_tokens_it_cannot_have_holds_nobody_up() -> None:
    async with engine_lab(**SLOW) as lab:
        bystander, rogue = await lab.gateway(), await lab.gateway(node_id="rogue")
        bystander.send(submission("innocent", PROMPT, 60))
        await bystander.has("innocent", 3)
        for number in range(4):
            name = f"r{number}"
            rogue.send(submission(name, PROMPT, 100))
            await rogue.has(name, 1)
            rogue.resume(name, [100_000])
            answer = await rogue.ended(name)
            assert isinstance(answer.error, RequestInvalid)
            assert "100000 tokens of choice 0" in answer.error.fact
        assert (await bystander.ended("innocent")).ids == oracle_tokens(PROMPT, 60)
